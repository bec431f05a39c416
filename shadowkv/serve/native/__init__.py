"""Other engines' own APIs: SGLang's ``/generate``, llama.cpp's ``/completion``, and related routes of llama.cpp."""
