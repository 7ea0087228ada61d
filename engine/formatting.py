"""Numbers and tables as a person reads them."""

import re
from collections.abc import Iterable, Sequence

__all__ = [
    "format_bytes",
    "format_count",
    "format_message",
    "format_names",
    "format_number",
    "format_run_name",
    "format_seconds",
    "format_value",
    "is_secret",
    "markdown_table",
    "printable",
    "url_name",
]

#: names whose values are not shown; tokenizers have special tokens, which are no secrets
_SECRET = re.compile(r"(.*_)?(password|passwd|passphrase|secret|credentials?|token|(api|access|private|secret)_?key)")
_NO_SECRET = re.compile(r"((pad|eos|bos|unk|mask|cls|sep|start|end|stop|special|image|audio)_)+token")
_HIDDEN = "'(not shown)'"
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
#: a text under a name, in a dict as Python writes it
_ENTRY = re.compile(f"({_TEXT}): ({_TEXT})")
#: control characters, less tab and line feed, and those that turn the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_UUID = re.compile(r"([0-9a-f]{8})(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def format_number(value: float) -> str:
    """Write a measured value.

    >>> format_number(0.98765), format_number(12.0)
    ('0.9877', '12')
    """
    return f"{value:.4g}"


def format_count(count: int, noun: str) -> str:
    """Write how many there are.

    >>> format_count(1, "epoch"), format_count(1200, "step")
    ('1 epoch', '1,200 steps')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_names(names: Sequence[str], most: int = 5) -> str:
    """Write the first `most` of some names, and how many more there are.

    >>> format_names(["weight", "bias", "scale"]), format_names(["weight", "bias", "scale"], most=2)
    ('weight, bias, scale', 'weight, bias and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    r"""Return a text with its control characters written out: a terminal would obey them.

    >>> printable("a\x1b[2J\tb\x9b")
    'a\\x1b[2J\tb\\x9b'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_secret(name: str) -> bool:
    """Whether the name of a setting says that its value must not be shown.

    >>> [is_secret(name) for name in ("model.hub_token", "args: api_key", "tokens", "pad_token")]
    [True, True, False, False]
    """
    last = (re.findall(r"[a-z0-9_]+", name.lower()) or [""])[-1]
    return _SECRET.fullmatch(last) is not None and _NO_SECRET.fullmatch(last) is None


def format_value(name: str, value: object) -> str:
    """Format a setting's value as Python does, without texts that are secrets by name.

    >>> format_value("hub", {"token": "hf_1234", "retries": 3}), format_value("token", "hf_1234")
    ("{'token': '(not shown)', 'retries': 3}", "'(not shown)'")
    """
    if isinstance(value, str) and is_secret(name):
        return _HIDDEN
    return _ENTRY.sub(lambda found: f"{found[1]}: {_HIDDEN}" if is_secret(found[1][1:-1]) else found[0], repr(value))


def format_seconds(value: float | None) -> str:
    """Write a duration.

    >>> [format_seconds(value) for value in (75.2, 3.04, 0.0123, 36_725.0, None)]
    ['1 min 15 s', '3.0 s', '12 ms', '10 h 12 min', '']
    """
    if value is None:
        return ""
    if value < 60:
        return f"{value:.1f} s" if value >= 0.1 or not value else f"{value * 1000:.0f} ms"
    minutes = int(value) // 60
    return f"{minutes} min {int(value) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_message(text: str, longest: int = 20_000) -> str:
    """Return a message, shortened to its beginning and end, since it can hold a whole batch.

    >>> format_message("ValueError: bad row: 0 0 0 0 0 0 0 0 in part 7", longest=30)
    'ValueError: bad... 16 characters are left out ...0 0 0 in part 7'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}... {len(text) - 2 * half:,} characters are left out ...{text[-half:]}"


def format_bytes(value: int) -> str:
    """Write a number of bytes.

    >>> format_bytes(512), format_bytes(1_250_000), format_bytes(3 * 10**9)
    ('512 bytes', '1.25 MB', '3 GB')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value} bytes"


def format_run_name(name: str) -> str:
    """Write a run's name; the id of a flow run at its beginning is shortened.

    >>> format_run_name("684f55e0-7a6c-4c5b-abd6-57172dac4886"), format_run_name("first")
    ('684f55e0', 'first')
    >>> format_run_name("684f55e0-7a6c-4c5b-abd6-57172dac4886-digits-3fa9c1d2")
    '684f55e0-digits-3fa9c1d2'
    """
    return _UUID.sub(r"\1", name, count=1) if _UUID.match(name) else name


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["metric", "value"], [["loss", "0.5"]]))
    | metric | value |
    | --- | --- |
    | loss | 0.5 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def url_name(url: str) -> str:
    """Return the last name in a path or URL: a run's, in that of its folder.

    >>> url_name("s3://bucket/runs/digits-7/")
    'digits-7'
    """
    return url.rstrip("/").rpartition("/")[2]
