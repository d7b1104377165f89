"""Makes the packaged running text from two Debian packages; needs apt-get and dpkg-deb, and no root.

    python benchmarks/make_essay.py            # downloads, then writes src/wakesight/data/*.txt.bz2
    python benchmarks/make_essay.py --debs DIR # uses the two .deb files in DIR

narrative: a novel of 1817 from r-cran-janeaustenr. expository: the longer paragraphs of the Jargon File from
jargon-text. Both texts are in the public domain; src/wakesight/data/NOTICE.md says so for users.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import lzma
import re
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "jargon-text")
TARGET = Path(__file__).parent.parent / "src/wakesight/data"
NOVEL = "persuasion"
LIMIT = 480_000  # characters of each text, about 110,000 tokens
SHORTEST = 160  # characters of a paragraph: shorter ones are headings, lists and cross references
BLUNT = re.compile(
    r"fuck|shit|\bass(es|hole)?\b|bitch|\bsex|porn|rape|nazi|hitler|drug|suck|screw|damn|crap|\bfag", re.IGNORECASE
)
QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "--"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debs", type=Path, help="folder with both .deb files; without it they are downloaded")
    folder = parser.parse_args().debs
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if folder is None:
            folder = root
            subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, check=True)
        for name in PACKAGES:
            (deb,) = folder.glob(f"{name}_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(deb), str(root / "files")], check=True)
            print(f"from {deb.name}")
        files = root / "files/usr"
        write("narrative", novel(files / "lib/R/site-library/janeaustenr/data"))
        write("expository", jargon(files / "share/doc/jargon-text/jargon.txt.gz"))


def write(name: str, paragraphs: list[str]) -> None:
    """As many whole paragraphs as fit, one per line."""
    kept: list[str] = []
    for paragraph in paragraphs:
        if sum(map(len, kept)) + len(paragraph) > LIMIT:
            break
        kept.append(paragraph)
    data = bz2.compress("\n".join(kept).encode() + b"\n", 9)
    (TARGET / f"{name}.txt.bz2").write_bytes(data)
    words = sum(len(paragraph.split()) for paragraph in kept)
    print(f"{name}: {len(kept)} paragraphs, {words:,} words, {sum(map(len, kept)):,} characters, {len(data):,} bytes")


def novel(folder: Path) -> list[str]:
    """Paragraphs of the novel: its lines are one character vector in the package's lazy-load database."""
    lines = r_strings(folder, NOVEL)
    start = next(i for i, line in enumerate(lines) if line.strip().lower() == "chapter 1") + 1
    blocks = "\n".join(line.rstrip() for line in lines[start:]).split("\n\n")
    paragraphs = (plain(block.replace("_", "")) for block in blocks)
    return [p for p in paragraphs if p and not p.lower().startswith(("chapter ", "finis", "the end"))]


def jargon(path: Path) -> list[str]:
    """Prose paragraphs, without etymologies in front, cross references behind, and coarse ones."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"^(\d+\. )?(\[[^\]]*\] )*", "", plain(block))
        paragraph = re.sub(r" ?(See( also)?|Compare|Oppose|cf\.) [^.]*\{[^.]*\.(?= |$)", "", paragraph)
        paragraph = re.sub(r"[{}]", "", paragraph)
        prose = re.match(r'[A-Z"]', paragraph) and re.search(r'[.!?")]$', paragraph)
        code = re.search(r"[<>|\\=]", paragraph)
        if prose and not code and len(paragraph) >= SHORTEST and not BLUNT.search(paragraph):
            paragraphs.append(paragraph)
    return list(dict.fromkeys(paragraphs))


def plain(block: str) -> str:
    """One line, with typewriter quotes: every tokenizer knows those."""
    return " ".join(block.translate(QUOTES).split())


def r_strings(folder: Path, name: str) -> list[str]:
    """A character vector of an R lazy-load database (Rdata.rdx is the index, Rdata.rdb holds the objects)."""
    index = gzip.decompress((folder / "Rdata.rdx").read_bytes())
    starts = [match.start() for match in re.finditer(rb"\x00\x00\x00\x0d\x00\x00\x00\x02", index)]
    names = re.findall(rb"(?s)\x00\x04\x00\x09\x00\x00\x00.([a-z]{4,})", index)[1:]  # without the word "names"
    places = [struct.unpack_from(">II", index, start + 8) for start in starts]
    offset, length = dict(zip(names, places, strict=False))[name.encode()]
    packed = (folder / "Rdata.rdb").read_bytes()[offset : offset + length]
    data = unpack(packed)
    # serialised: header with the native encoding, then STRSXP (type 16): length and strings
    at = 14 + 4 + struct.unpack_from(">I", data, 14)[0] if data[5] == 3 else 14
    kind, count = struct.unpack_from(">II", data, at)
    if kind & 0xFF != 16:
        raise SystemExit(f"{name} in {folder} is no character vector; the package has changed")
    at += 8
    strings = []
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        at += 8
        strings.append(data[at : at + max(size, 0)].decode("utf-8"))
        at += max(size, 0)
    return strings


def unpack(packed: bytes) -> bytes:
    """R puts the length in front, and a letter for every method but zlib."""
    method = packed[4:5]
    if method == b"Z":
        return lzma.decompress(packed[5:], lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    return bz2.decompress(packed[5:]) if method == b"2" else zlib.decompress(packed[4:])


if __name__ == "__main__":
    main()
