"""What other engines' own clients ask, beside the OpenAI API: SGLang's ``/generate``, llama.cpp's ``/completion``."""
