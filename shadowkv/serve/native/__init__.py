"""APIs of other engines besides the OpenAI API: SGLang's ``/generate`` and llama.cpp's ``/completion``."""
