#!/usr/bin/env python3
"""Compiles the *.cu of each crate's kernels/ to the PTX and cubins in its ptx/, which are committed and embedded.

They are packed: PTX by Zstandard; a cubin as the length (32 bits, little-endian) and one LZ4 block. PLAIN is there as
it is, too. Of examples there is PTX as text, and nothing else.

    python3 kernels/build.py                   write all ptx/
    python3 kernels/build.py --check           rebuild and compare byte for byte; exit 1 and name what differs
    python3 kernels/build.py --check shape     one family
    python3 kernels/build.py --check --quick   compares digests of all, and rebuilds an eighth, chosen by the commit

A rebuild of all takes minutes. So DIGESTS has a line for each family: the SHA-256 of all that it is compiled from, and
of what came out. A source that was changed without a build does not fit its line, nor an output changed by hand.

Needs python3 with venv and pip. No GPU, driver or CUDA toolkit: NVRTC comes from PyPI, at the exact version below,
into target/kernels-venv. The same sources give the same bytes on every x86-64 Linux machine.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import hashlib
import os
import pathlib
import re
import struct
import subprocess
import sys

import waits

KERNELS = pathlib.Path(__file__).resolve().parent
ROOT = KERNELS.parent
EXAMPLES = [ROOT / "examples" / name for name in ("prove", "gpt", "decode", "own_kernel/kernels")]
# One for each crate with kernels. Headers are in the first one.
FOLDERS = [KERNELS, ROOT / "crates" / "train" / "kernels"] + EXAMPLES
VENV = ROOT / "target" / "kernels-venv"
DIGESTS = KERNELS / "digests.txt"

# 12.2 is the newest NVRTC whose PTX (ISA 8.2) drivers from 535 on accept.
PACKAGES = ["nvidia-cuda-nvrtc-cu12==12.2.140", "lz4==4.4.5", "zstandard==0.25.0"]

# PTX for every GPU from Turing on; machine code for the two that data centres have, so that they start without a JIT.
PTX_ARCH = "compute_75"
CUBIN_ARCHES = ["sm_80", "sm_90"]

# From this architecture on a kernel can be launched early, since it can wait for the kernel before it on its stream:
# `await_earlier` in access.cuh.
EARLY_ARCH = "compute_90"

# Programs of the guide, tests and benches load its PTX as users load theirs.
PLAIN = "elementwise"

# Families whose kernels have barriers without fixed numbers: ROWS_SHARE_BLOCKS in rows.cuh.
ALL_BARRIERS = ("norm_inbox", "norm_pull")

# fmad=false: products are fused into additions only where a source says fma, see common.cuh.
OPTIONS = ["--std=c++17", "--fmad=false"]


def site_packages():
    """The virtual environment's packages, installed when they are not there yet."""
    stamp = VENV / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run(pip + PACKAGES, check=True)
        stamp.write_text(wanted)
    (found,) = glob.glob(str(VENV / "lib" / "python3*" / "site-packages" / "nvidia"))
    return pathlib.Path(found)


class Nvrtc:
    """The few functions of NVRTC that a build needs."""

    def __init__(self, packages):
        lib = packages / "cuda_nvrtc" / "lib"
        # NVRTC opens its builtins by bare name; having them in the process already is what makes that work.
        (builtins,) = glob.glob(str(lib / "libnvrtc-builtins.so.*"))
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(lib / "libnvrtc.so.12"))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *args):
        code = getattr(self.lib, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def output(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, data)
        return data.raw

    def compile(self, source, arch, what):
        program = ctypes.c_void_p()
        # The base name only: a path would make the output depend on where the checkout lies.
        text, name = source.read_bytes(), source.name.encode()
        self.call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = OPTIONS + [f"--gpu-architecture={arch}", f"-I{KERNELS}"]
            array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            if self.lib.nvrtcCompileProgram(program, len(options), array) != 0:
                log = self.output(program, "ProgramLog").rstrip(b"\0").decode()
                sys.exit(f"{source.name} for {arch} does not compile:\n{log}")
            return self.output(program, what)
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def check_ptx(source, ptx):
    """Every entry of the source is in the PTX, for the oldest architecture, and none is there twice."""
    text = ptx.decode()
    if not re.search(r"^\.target sm_75$", text, re.M):
        sys.exit(f"{source.name}: the PTX is not for sm_75")
    entries = re.findall(r"^\.visible \.entry (\w+)\(", text, re.M)
    named = re.findall(r'^extern "C" __global__ void (\w+)\(', source.read_text(), re.M)
    missing = set(named) - set(entries)
    if missing or not entries or len(set(entries)) != len(entries):
        sys.exit(f"{source.name}: the entries of the PTX are wrong: {entries}, missing {sorted(missing)}")
    check_variables(source, text)
    return entries


def check_variables(source, text):
    """Pools have the crate's modules in common."""
    variables = used_variables(text)
    if variables:
        sys.exit(f"{source.name}: a module of the crate must have no variables: {variables}")


def used_variables(text):
    """Variables of a module that something in it names. (NVRTC's headers bring constants that nothing does.)"""
    declared = re.findall(r"^(?:\.\w+ )*\.(?:global|const) .*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;$", text, re.M)
    return [name for name in declared if len(re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", text)) > 1]


def check_waits(nvrtc, source):
    """Kernels that meet may be launched before the kernel before them has ended, and wait for it first of all."""
    text = nvrtc.compile(source, EARLY_ARCH, "PTX").rstrip(b"\0").decode()
    check_variables(source, text)
    if not re.search(r"^ *KERNEL ", source.read_text(), re.M):
        return
    for entry, body in waits.entries(text):
        wrong = waits.before_wait(body)
        if wrong:
            sys.exit(f"{source.name}: {entry} gets to `{wrong}` before it has called await_earlier()")


def check_barriers(source, cubin):
    """A barrier without a fixed number takes all 16 of a block, so fewer blocks fit on a multiprocessor."""
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    flags = [struct.unpack_from("<Q", cubin, start + i * size + 8)[0] for i in range(count)]
    # Of sections with code. The number of barriers is in bits that belong to the processor.
    most = max(flag >> 20 & 0x7F for flag in flags if flag & 4)
    if (most == 16) != (source.stem in ALL_BARRIERS):
        sys.exit(f"{source.name}: a kernel takes {most} barriers")


def family(source):
    """The outputs of one source: path -> bytes."""
    nvrtc = Nvrtc(site_packages())
    ptx = nvrtc.compile(source, PTX_ARCH, "PTX").rstrip(b"\0")
    # NVRTC numbers calls in comments, and goes on counting in the next family.
    ptx = re.sub(rb"// callseq \d+", b"// callseq", ptx)
    entries = check_ptx(source, ptx)
    check_waits(nvrtc, source)
    print(f"{source.name}: {len(entries)} entries: {' '.join(entries)}", flush=True)
    if source.parent in EXAMPLES:
        return {source.parent / "ptx" / f"{source.stem}.ptx": ptx}
    cubins = {f"{source.stem}.{arch}.cubin": nvrtc.compile(source, arch, "CUBIN") for arch in CUBIN_ARCHES}
    for cubin in cubins.values():
        check_barriers(source, cubin)
    images = {f"{source.stem}.ptx": ptx, **cubins}
    packed = dict(pack(name, image) for name, image in images.items())
    outputs = packed | (images if source.stem == PLAIN else {})
    return {source.parent / "ptx" / name: data for name, data in outputs.items()}


def pack(name, image):
    """The decoder is `unpack` in src/driver/module.rs, which says why there are two formats."""
    sys.path.append(str(site_packages().parent))
    import lz4.block
    import zstandard

    if name.endswith(".ptx"):
        return f"{name}.zst", zstandard.ZstdCompressor(level=19).compress(image)
    return f"{name}.lz4", lz4.block.compress(image, mode="high_compression", compression=12, store_size=True)


def digest(chunks):
    """SHA-256 of byte strings, each with its length."""
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(b"%d " % len(chunk) + chunk)
    return sha.hexdigest()


def inputs_digest(source):
    """Of everything that a family is compiled from. (Every header counts, used or not.)"""
    settings = repr((PACKAGES, PTX_ARCH, CUBIN_ARCHES, EARLY_ARCH, PLAIN, OPTIONS))
    files = [*sorted(KERNELS.glob("*.cuh")), KERNELS / "waits.py", source]
    return digest([settings.encode(), *(part for file in files for part in (file.name.encode(), file.read_bytes()))])


def outputs_of(source, files):
    """The outputs of a family, of these files: path -> bytes."""
    return {path: data for path, data in files.items()
            if path.parent == source.parent / "ptx" and path.name.split(".")[0] == source.stem}


def line(source, files):
    """The line of a family in DIGESTS, for these outputs."""
    outputs = sorted(outputs_of(source, files).items())
    of_outputs = digest(part for path, data in outputs for part in (path.name.encode(), data))
    return f"{source.stem} {inputs_digest(source)} {of_outputs}"


def an_eighth(families):
    """An eighth of the families, chosen by the commit. Each eighth has large families and small ones."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    by_size = sorted(families, key=lambda name: (-families[name].stat().st_size, name))
    return by_size[int(commit, 16) % 8::8]


def build(sources):
    """The outputs of all sources: path -> bytes."""
    waits.test()
    site_packages()
    # A process for each core; the largest families first.
    sources = sorted(sources, key=lambda source: -source.stat().st_size)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return {path: data for outputs in pool.map(family, sources) for path, data in outputs.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files in ptx/ instead of writing them")
    parser.add_argument("--quick", action="store_true", help="with --check: digests, and an eighth built")
    parser.add_argument("families", nargs="*", help="all of them if none is named")
    args = parser.parse_args()

    families = {source.stem: source for folder in FOLDERS for source in folder.glob("*.cu")}
    unknown = set(args.families) - families.keys()
    if unknown:
        sys.exit(f"no such family: {' '.join(sorted(unknown))}")
    built = args.families or (an_eighth(families) if args.check and args.quick else list(families))
    outputs = build([families[name] for name in built])
    everything = {}
    for folder in FOLDERS:
        (folder / "ptx").mkdir(exist_ok=True)
        everything |= {path: path.read_bytes() for path in (folder / "ptx").iterdir()}
    present = {path: data for path, data in everything.items()
               if set(built) >= families.keys() or path.name.split(".")[0] in built}
    differing = sorted(path for path in outputs.keys() | present.keys() if outputs.get(path) != present.get(path))
    if args.check:
        written = DIGESTS.read_text().splitlines() if DIGESTS.exists() else []
        lines = [line(source, everything) for _, source in sorted(families.items())]
        stale = sorted({text.split()[0] for text in set(lines) ^ set(written)})
        if differing or stale:
            names = " ".join([*(str(path.relative_to(ROOT)) for path in differing), *stale])
            sys.exit(f"these do not fit their sources, run kernels/build.py: {names}")
        print(f"{len(outputs)} files are what their sources give; {len(lines)} families fit their digests")
        return
    for path in differing:
        if path in outputs:
            path.write_bytes(outputs[path])
            everything[path] = outputs[path]
        else:
            os.remove(path)
            del everything[path]
        print(f"{'wrote' if path in outputs else 'removed'} {path.relative_to(ROOT)}")
    old = dict(text.split(" ", 1) for text in DIGESTS.read_text().splitlines()) if DIGESTS.exists() else {}
    lines = [line(source, everything) if name in built or name not in old else f"{name} {old[name]}"
             for name, source in sorted(families.items())]
    DIGESTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
