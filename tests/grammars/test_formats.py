"""Formats of JSON Schema accept valid texts, reject invalid ones, and agree with other parsers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import date, datetime
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.grammars.formats import FORMATS, WRITTEN
from nanovllm.grammars.schema import compiled
from tests.load.schemas import compiler, matches, tag

RIGHT = {
    "date": "2024-02-29 1900-02-28 2000-02-29 1582-10-15 2100-12-31 0004-02-29 9999-04-30",
    "time": "23:59:60Z 00:00:00z 12:30:15.123456789+05:30 08:59:60-15:00 01:29:60+01:30",
    "date-time": "1969-07-20T20:17:40Z 2199-01-01t00:00:00.5-12:00 1998-12-31T15:59:60-08:00",
    "duration": "P3Y6M4DT12H30M5S PT36H P1W P1Y2M P1M2D PT0S P400D PT1M2S",
    "email": 'a@b a.b+c@mail.example.co.uk x@[10.0.0.1] x@[IPv6:::1] "a@b"@c.de o\'neil@x.org',
    "idn-email": "δοκιμή@example.com 测试@例子.cn a@b.de",
    "hostname": "localhost a.b.c.d.e.f a--b.com 127.0.0.1 X9 xn nx--a.de x-n--a.x " + "a" * 63,
    "idn-hostname": "例子.中国 münchen.de пример.рф localhost",
    "ipv4": "0.0.0.0 255.255.255.255 10.1.2.3",
    "ipv6": "::1 :: 1::8 1:2:3:4:5:6:7:8 fe80::1 ::ffff:10.0.0.1 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8",
    "uri": "http://localhost:8080/a%20b?q=1#top mailto:a@b.c urn:isbn:0 file:///etc tel:+1-2 "
    "http://[::1]:80/ ftp://u:p@h/;x=1 a: http://example.com:65535",
    "uri-reference": "/a/b ../c?d #e //host/x http://h/ a/b:c ?q",
    "iri": "http://例子.cn/路径?q=é#ü http://h/%20",
    "iri-reference": "/é/ü ö#ß",
    "uri-template": "/users/{id}{?page,size:3,tags*} {+path}/x plain",
    "uuid": "123e4567-E89B-12d3-a456-426614174000 00000000-0000-0000-0000-000000000000",
    "json-pointer": "/a/b~0c/~1 / /0//x",
    "relative-json-pointer": "0 1/a 12# 3/x/~1",
    "regex": "^[a-z]+$ \\d+ a.b ^x?[^0-9]*$",
}
WRONG = {
    "date": "2023-02-29 1900-02-29 2024-13-01 2024-04-31 24-01-01 2024-1-1 0000-01-01 2024-01-01Z",
    "time": "24:00:00Z 12:60:00Z 12:00:60Z 12:00:00 22:59:60Z 12:00:00+24:00 1:00:00Z 12:00Z",
    "date-time": "2024-01-01 2024-01-01T00:00:00 2023-02-29T00:00:00Z 2024-01-01_00:00:00Z",
    "duration": "P P1 PT P1YT PT1D P1D1M P1Y2D PT1H2S 1D P1.5D -P1D P1W2D",
    "email": "a @b a@ a..b@c .a@b a.@b a@b@c a@-b a@b_c a@[300.0.0.1]",
    "idn-email": "例子 @例子.cn a@@b",
    "hostname": "-a a- a..b .a a. a_b xn--x XN--x a.xn--b é.de " + "a" * 64,
    "idn-hostname": "-例 例_子 〮例 a..b",
    "ipv4": "256.0.0.1 1.2.3 1.2.3.4.5 01.2.3.4 1.2.3.4/8",
    "ipv6": "1::2::3 12345:: ::g 1:2:3:4:5:6:7 ::1%eth0 1:2:3:4:5:6:7:8:9 1.2.3.4 ::1.2.3.04",
    "uri": "a /a //a http://a%2 http://a%zz 1a: http://[::1 http://a:b/ http://é",
    "uri-reference": "\\a %z a^b a|b",
    "iri": "/é http://a%é a",
    "iri-reference": "\\é %é",
    "uri-template": "{ {a {a,} {=a} {a:0} a}b",
    "uuid": "123e4567-e89b-12d3-a456-42661417400 123e4567e89b12d3a456426614174000 {x}",
    "json-pointer": "a a/b /~ /~2",
    "relative-json-pointer": "01 -1 /a a 1#a",
    "regex": "a** [ ) \\q *a",
}


@pytest.mark.parametrize("name", FORMATS)
def test_both_ways(name: str) -> None:
    whole = re.compile(FORMATS[name])
    assert [text for text in RIGHT[name].split(" ") if not whole.fullmatch(text)] == []
    assert [text for text in WRONG[name].split(" ") if whole.fullmatch(text)] == []
    if "json-pointer" not in name:  # JSON pointers may have any characters
        assert not whole.fullmatch(RIGHT[name].split(" ")[0] + "\n")


def is_date(text: str) -> bool:
    return bool(date.fromisoformat(text))


def is_moment(text: str) -> bool:
    without = re.sub(r"\.[0-9]+", "", text.upper())  # Python parses at most six digits of a second
    return ":60" in text or bool(datetime.fromisoformat(without))


def is_uri(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme) and text.isascii() and " " not in text


READERS: dict[str, Callable[[str], object]] = {
    "date": is_date,
    "date-time": is_moment,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": UUID,
    "uri": is_uri,
    "regex": re.compile,
}


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_allow_the_same(name: str) -> None:
    """The grammars allow the same texts, except the longest host names and local parts of mail."""
    text = compiled({"type": "string", "format": name}, "x", exact=True)
    grammar = compiler().compile_structural_tag(tag(text))
    texts = [text for text in RIGHT[name].split(" ") if len(text) < 60]
    assert [text for text in texts if not matches(grammar, text)] == []
    assert [text for text in WRONG[name].split(" ") if matches(grammar, text)] == []
    if name in WRITTEN:
        assert matches(grammar, RIGHT[name].split(" ")[0])
        assert not matches(grammar, "a" * 65 + RIGHT[name].split(" ")[0])


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=100)
@given(data=st.data())
def test_another_reader_takes_all_that_matches(name: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(re.compile(FORMATS[name], re.ASCII), fullmatch=True))
    assert READERS[name](text)


@settings(max_examples=200)
@given(address=st.one_of(st.ip_addresses(v=6), st.ip_addresses(v=4)), zeros=st.booleans())
def test_every_address_can_be_written(address: ipaddress.IPv6Address, zeros: bool) -> None:
    text = address.exploded if zeros else address.compressed
    assert re.fullmatch(FORMATS[f"ipv{address.version}"], text)


@given(day=st.dates(), moment=st.datetimes(timezones=st.timezones()))
def test_every_day_and_moment_can_be_written(day: date, moment: datetime) -> None:
    assert re.fullmatch(FORMATS["date"], day.isoformat())
    text = moment.isoformat()
    if re.search(r"[+-]\d\d:\d\d$", text):  # some historical zones have seconds
        assert re.fullmatch(FORMATS["date-time"], text)
