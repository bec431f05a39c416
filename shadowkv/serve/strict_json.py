"""Bodies in strict RFC 8259 JSON: UTF-8, no NaN, nothing that is ambiguous or could not be written back."""

from __future__ import annotations

import json
import math
import re
from json import JSONDecodeError
from typing import Any, NoReturn

from shadowkv.serve.limits import MAX_KEYS

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(raw: bytes) -> Any:
    """The value; raises JSONDecodeError."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise JSONDecodeError(f"byte {error.start} is not UTF-8", "", 0) from error
    except UnicodeEncodeError as error:
        raise JSONDecodeError("a string has half of a surrogate pair", "", 0) from error
    except RecursionError as error:
        raise JSONDecodeError("it is nested too deeply", "", 0) from error
    except JSONDecodeError:
        raise
    except ValueError as error:
        raise JSONDecodeError("a number has too many digits", "", 0) from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise JSONDecodeError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are allowed", "", 0)
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JSONDecodeError(f"the key {key!r} is there twice", "", 0)
            seen.add(key)
    return found


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise JSONDecodeError("a number is beyond the range of floating point", "", 0)
    return number


def _constant(name: str) -> NoReturn:
    raise JSONDecodeError(f"{name} is no JSON number", "", 0)
