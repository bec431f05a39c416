"""What a server may answer to which body, by the documents of the APIs"""
