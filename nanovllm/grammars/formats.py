"""The formats of JSON Schema as regular expressions for whole strings, after their standards.

Where implementations of a standard disagree, a match is valid for all of them. There is no year
0000, no zone in an IPv6 address and no A-label (xn--...), whose letters no expression can check.
Numbers have at most nine digits, so that a model cannot write one without end. This module is
independent of JSON's escapes and of grammars.
"""

from __future__ import annotations

_TWO = "(?:0[48]|[2468][048]|[13579][26])"  # two digits divisible by 4, except 00
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    f"(?:[0-9]{{2}}{_TWO}|{_TWO}00)-02-29)"
)
_PARTS = r"(?:\.[0-9]{1,9})?"  # fraction of a second
_HOURS = "(?:[01][0-9]|2[0-3])"


def _leap_second() -> str:
    """Return the times of a leap second (23:59:60 UTC) at offsets of whole half hours."""
    by_minute: dict[str, list[str]] = {"59": [], "29": []}
    for offset in range(0, 24 * 60, 30):
        written = f"{offset // 60:02}:{offset % 60:02}"
        for sign, local in (("+", 23 * 60 + 59 + offset), ("-", 23 * 60 + 59 - offset)):
            hour, minute = divmod(local % (24 * 60), 60)
            by_minute[f"{minute}"].append(f"{hour:02}:{minute}:60{_PARTS}[{sign}]{written}")
    return "|".join([f"23:59:60{_PARTS}[Zz]", *by_minute["59"], *by_minute["29"]])


_TIME = (
    f"(?:{_HOURS}:[0-5][0-9]:[0-5][0-9]{_PARTS}(?:[Zz]|[+-]{_HOURS}:[0-5][0-9])|{_leap_second()})"
)
_N = "[0-9]{1,9}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"{_N}D"
_MONTHS = f"{_N}M(?:{_DAYS})?"
_CALENDAR = f"(?:{_DAYS}|{_MONTHS}|{_N}Y(?:{_MONTHS})?)"

# -- hosts -----------------------------------------------------------------------------------

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LAST_32 = f"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """Return RFC 3986's nine forms: eight groups, or :: in place of the omitted ones."""
    forms = [f"(?:{_H16}:){{6}}{_LAST_32}"]
    for before in range(8):  # most groups before the ::
        left = "" if not before else f"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?"
        groups = 7 - before  # most groups after it
        if groups >= 2:
            right = f"(?:(?:{_H16}:){{{groups - 2}}}{_LAST_32})"
        else:
            right = _H16 if groups == 1 else ""
        forms.append(f"{left}::{right}")
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()


def _label(letter: str, size: int) -> str:
    """Return a host name's label of at most `size` characters that does not begin with xn--.

    `letter`: the content of the character class, including A-Z and a-z. `size`: 0 for any.
    """

    def rest(most: int) -> str:
        return f"(?:[{letter}-]{{0,{most - 1 if size else ''}}}[{letter}])?"

    not_x = letter.replace("a-z", "a-wyz").replace("A-Z", "A-WYZ")
    not_n = letter.replace("a-z", "a-mo-z").replace("A-Z", "A-MO-Z")
    after_x = f"[{not_n}]{rest(size - 2)}|-[{letter}-]{{0,{size - 3 if size else ''}}}[{letter}]"
    after_xn = f"[{letter}]{rest(size - 3)}|-[{letter}]{rest(size - 4)}"
    return f"(?:[{not_x}]{rest(size - 1)}|[xX](?:{after_x}|[nN](?:{after_xn})?)?)"


_ALNUM = "A-Za-z0-9"
_LABEL = _label(_ALNUM, 63)
_SHORT = _label(_ALNUM, 30)
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_SHORT}(?:\.{_SHORT}){{3,7}})"  # at most 253 chars
# Lower-case letters of scripts without rules about adjacent letters. Ten of them take at most 63
# characters as an A-label.
_LETTERS = "\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c9\u0430-\u044f"
_LETTERS += "\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5\uac00-\ud7a3"
_IDN = rf"[0-9a-z{_LETTERS}]{{1,10}}"
_IDN_HOST = rf"(?:{_HOST}|{_IDN}(?:\.{_IDN}){{0,4}})"

# -- mail ------------------------------------------------------------------------------------

_ATEXT = "A-Za-z0-9!#$%&'*+/=?^_`{|}~-"
_DOTLESS = f"[{_ATEXT}]{{1,64}}"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_LITERAL = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"

# -- URIs ------------------------------------------------------------------------------------

_PCT = "%[0-9A-Fa-f]{2}"
_UNRESERVED = "A-Za-z0-9._~"  # and -, which must be last in a class
_SUB = "!$&'()*+,;="
_BEYOND = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd"  # non-ASCII ones in IRIs
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"


def _uris(beyond: str) -> tuple[str, str]:
    """Return (absolute URI, absolute or relative one). `beyond`: further unescaped characters."""
    pchar = f"(?:[{_UNRESERVED}{_SUB}:@{beyond}-]|{_PCT})"
    no_colon = f"(?:[{_UNRESERVED}{_SUB}@{beyond}-]|{_PCT})"
    user = f"(?:(?:[{_UNRESERVED}{_SUB}:{beyond}-]|{_PCT})*@)?"
    name = f"(?:[{_UNRESERVED}{_SUB}{beyond}-]|{_PCT})*"
    future = rf"v[0-9A-Fa-f]+\.[{_UNRESERVED}{_SUB}:-]+"
    authority = rf"//{user}(?:\[(?:{_IPV6}|{future})\]|{name})(?::[0-9]*)?(?:/{pchar}*)*"
    segments = f"(?:/{pchar}*)*"
    absolute_path = f"/(?:{pchar}+{segments})?"
    ending = rf"(?:\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    absolute = f"{_SCHEME}:(?:{authority}|{absolute_path}|{pchar}+{segments}|){ending}"
    relative = f"(?:{authority}|{absolute_path}|{no_colon}+{segments}|){ending}"
    return absolute, f"(?:{absolute}|{relative})"


_URI, _URI_REFERENCE = _uris("")
_IRI, _IRI_REFERENCE = _uris(_BEYOND)
_VARNAME = rf"(?:[A-Za-z0-9_]|{_PCT})+(?:\.(?:[A-Za-z0-9_]|{_PCT})+)*"
_VARSPEC = rf"{_VARNAME}(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = rf"(?:[!#$&-;=?-\[\]_a-z~{_BEYOND}]|{_PCT}|\{{[+#./;?&]?{_VARSPEC}(?:,{_VARSPEC})*\}})*"
_WIDE = f"[{_ATEXT[:-1]}{_BEYOND}-]"
_CLASS = r"\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ ])+\]"
_ATOM = rf"(?:[A-Za-z0-9 _<>=!@#%&,;:'/~-]|\\[dDsSwW.]|{_CLASS}|\.)"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_N}W)",
    "email": rf"(?:{_DOTLESS}(?:\.{_DOTLESS}){{0,4}}|{_QUOTED})@(?:{_HOST}|{_LITERAL})",
    "idn-email": rf"(?:{_WIDE}+(?:\.{_WIDE}+)*|{_QUOTED})@(?:{_IDN_HOST}|{_LITERAL})",
    "hostname": _HOST,
    "idn-hostname": _IDN_HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": rf"\^?(?:{_ATOM}[*+?]?)*\$?",  # no groups: nested ones are not regular
}
# Variants for a schema that also has a length or a pattern. They are shorter than most limits,
# because all combinations of both must be counted.
_SOME = rf"{_label(_ALNUM, 20)}(?:\.{_label(_ALNUM, 20)}){{0,2}}"
_MAIL = rf"[{_ATEXT}]{{1,20}}(?:\.[{_ATEXT}]{{1,20}}){{0,1}}@{_SOME}"
SHORTER = {"hostname": _SOME, "idn-hostname": _SOME, "email": _MAIL, "idn-email": _MAIL}
# Variants for a schema with only the format. Host names and the part before an @ have no limit per
# label. The name of a group has the group's limit of characters (parts.py).
_ANY_LABEL = _label(_ALNUM, 0)
_HOST_NAME = rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*"
_NAME = rf"[{_ATEXT}]+(?:\.[{_ATEXT}]+)*"
_WRITTEN_MAIL = rf"(?:(?P<most64>{_NAME})|{_QUOTED})@(?:(?P<most63>{_HOST_NAME})|{_LITERAL})"
WRITTEN = {
    "hostname": f"(?P<most63>{_HOST_NAME})",
    "idn-hostname": rf"(?P<most63>{_HOST_NAME})|{_IDN}(?:\.{_IDN}){{0,4}}",
    "email": _WRITTEN_MAIL,
    "idn-email": rf"(?:(?P<most64>{_WIDE}+(?:\.{_WIDE}+)*)|{_QUOTED})@"
    rf"(?:(?P<most63>{_HOST_NAME})|{_LITERAL}|{_IDN}(?:\.{_IDN}){{0,4}})",
}
