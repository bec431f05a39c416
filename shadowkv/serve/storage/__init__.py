"""What clients have the server keep: files, responses and batches, each of the API key that has sent it"""
