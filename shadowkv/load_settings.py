"""What settings of loading a model can be: for ``models``, and for flags, which are named without PyTorch."""

LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
