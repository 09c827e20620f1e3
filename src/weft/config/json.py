"""JSON text of plain data, as standard JSON has it: without NaN and infinity."""

import json
from typing import Any

from weft.errors import WeftError


def write_json(value: Any) -> str:
    """Return one line of JSON; a number that JSON does not have is an error."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise WeftError(f"a number is NaN or infinite, which JSON does not have: {repr(value)[:200]}") from None
