"""The OpenAI API's responses: ``/v1/responses``."""
