"""A small GGUF file in its parts, written byte by byte, so that any of them can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from bad_files import CONTEXT, HEAD_DIM, HEADS, HIDDEN, INNER, VOCAB
from gguf import GGUFValueType as Kind

F32 = 0
ALIGNMENT = 32
_FORMATS = {
    Kind.UINT8: "<B",
    Kind.UINT32: "<I",
    Kind.INT32: "<i",
    Kind.UINT64: "<Q",
    Kind.INT64: "<q",
    Kind.FLOAT32: "<f",
    Kind.BOOL: "<?",
}
_DIMENSIONS = {
    "token_embd": (HIDDEN, VOCAB),
    "output_norm": (HIDDEN,),
    "output": (HIDDEN, VOCAB),
    **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (HIDDEN, INNER),
    "blk.0.ffn_up": (HIDDEN, INNER),
    "blk.0.ffn_down": (INNER, HIDDEN),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: Kind, value: object) -> bytes:
    """A GGUF value."""
    return text(value) if isinstance(value, str | bytes) else struct.pack(_FORMATS[kind], value)


def array(kind: Kind, values: list, length: int | None = None) -> tuple[Kind, bytes]:
    """A GGUF array; ``length`` is what it says of itself."""
    stated = len(values) if length is None else length
    return Kind.ARRAY, struct.pack("<IQ", kind, stated) + b"".join(scalar(kind, value) for value in values)


@dataclass
class Entry:
    """What a file says of a tensor: its dimensions, fastest first, its type, and where it starts in the data."""

    dims: list[int]
    offset: int
    kind: int = F32


@dataclass
class RawGGUF:
    """A file; ``bytes`` puts it together."""

    magic: bytes = b"GGUF"
    version: int = 3
    fields: dict[str, tuple[Kind, bytes]] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    data: bytes = b""
    doubled_field: str | None = None
    doubled_tensor: str | None = None
    stated_fields: int | None = None
    stated_tensors: int | None = None

    def set(self, key: str, kind: Kind, value: object) -> None:
        """Give a field a value."""
        self.fields[key] = (kind, scalar(kind, value))

    def bytes(self) -> bytes:
        """The file's content."""
        fields, tensors = [*self.fields.items()], [*self.tensors.items()]
        fields += [(key, value) for key, value in fields if key == self.doubled_field]
        tensors += [(name, entry) for name, entry in tensors if name == self.doubled_tensor]
        counts = [
            len(found) if stated is None else stated
            for found, stated in ((tensors, self.stated_tensors), (fields, self.stated_fields))
        ]
        parts = [self.magic, struct.pack("<IQQ", self.version, *counts)]
        parts += [text(key) + struct.pack("<I", kind) + raw for key, (kind, raw) in fields]
        for name, entry in tensors:
            dims = struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims)
            parts.append(text(name) + dims + struct.pack("<IQ", entry.kind, entry.offset))
        header = b"".join(parts)
        return header + bytes(-len(header) % ALIGNMENT) + self.data


def good_file() -> RawGGUF:
    """A llama of one layer with a byte-level tokeniser, all weights zero."""
    file = RawGGUF()
    file.set("general.architecture", Kind.STRING, "llama")
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": 1,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "rope.dimension_count": HEAD_DIM,
    }
    for key, value in sizes.items():
        file.set(f"llama.{key}", Kind.UINT32, value)
    file.set("llama.attention.layer_norm_rms_epsilon", Kind.FLOAT32, 1e-5)
    file.set("llama.rope.freq_base", Kind.FLOAT32, 10000.0)
    tokens = [chr(ord("!") + index) for index in range(VOCAB - 7)] + [f"[{index}]" for index in range(6)] + ["ab"]
    file.set("tokenizer.ggml.model", Kind.STRING, "gpt2")
    file.set("tokenizer.ggml.pre", Kind.STRING, "gpt-2")
    file.fields["tokenizer.ggml.tokens"] = array(Kind.STRING, tokens)
    file.fields["tokenizer.ggml.token_type"] = array(Kind.INT32, [1] * VOCAB)
    file.fields["tokenizer.ggml.merges"] = array(Kind.STRING, ["a b"])
    for name, token in (("bos", 1), ("eos", 2), ("unknown", 0)):
        file.set(f"tokenizer.ggml.{name}_token_id", Kind.UINT32, token)
    file.set("tokenizer.chat_template", Kind.STRING, "{{ messages }}")
    for name, dims in _DIMENSIONS.items():
        file.tensors[f"{name}.weight"] = Entry([*dims], len(file.data))
        size = 4 * dims[0] * (dims[1] if len(dims) > 1 else 1)
        file.data += bytes(size + -size % ALIGNMENT)
    return file
