"""Output that follows a JSON schema"""
