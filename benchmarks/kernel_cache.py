"""Caches what NVRTC compiles, so that a matrix of engines compiles no kernel twice.

``build_engines.py --kernel-cache FOLDER`` starts every build with this file as ``sitecustomize``.
The key is the complete input of the compiler: its version, the program's name and text, the
options, and the bytes of every header that the text includes in quotes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_FOLDER_OPTION = "-I"


class Program:
    """A program, before and after compilation."""

    def __init__(self, text: bytes, name: bytes) -> None:
        self.text, self.name = text, name
        self.code, self.log = b"", b""

    def key(self, version: tuple[int, ...], options: list[str]) -> str:
        """Return a digest of all compiler input; include folders only locate headers."""
        folders = [Path(o[2:]) for o in options if o.startswith(_FOLDER_OPTION)]
        message = [o for o in options if not o.startswith(_FOLDER_OPTION)]
        digest = hashlib.sha256(json.dumps([version, message, self.name.decode()]).encode())
        for part in (self.text, *headers(self.text, folders, set())):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def headers(text: bytes, folders: list[Path], seen: set[Path]) -> list[bytes]:
    """Return the included headers of ``text``, recursively, from the first folder that has each."""
    result = []
    for name in _INCLUDE.findall(text):
        paths = [(folder / name.decode()).resolve() for folder in folders]
        path = next((p for p in paths if p.is_file()), None)
        if path is not None and path not in seen:  # A missing one is behind an #if.
            seen.add(path)
            inner = path.read_bytes()
            result += [inner, *headers(inner, [path.parent, *folders], seen)]
    return result


def install(nvrtc: Any, folder: Path) -> None:
    """Insert the cache between ``cuda.bindings.nvrtc`` and its callers."""
    real = {name: getattr(nvrtc, name) for name in vars(nvrtc) if name.startswith("nvrtc")}
    good = nvrtc.nvrtcResult.NVRTC_SUCCESS
    folder.mkdir(parents=True, exist_ok=True)

    def compile_program(program: Program, _count: int, options: list[bytes]) -> tuple[Any]:
        key = program.key(real["nvrtcVersion"]()[1:], [option.decode() for option in options])
        selected = folder / key
        if selected.is_file():
            data = selected.read_bytes()
            size = int.from_bytes(data[:8], "little")
            program.log, program.code = data[8 : 8 + size], data[8 + size :]
            return (good,)
        status = compile_now(program, options)
        if status == good:
            created = selected.with_name(f"{key}.{os.getpid()}")
            created.write_bytes(len(program.log).to_bytes(8, "little") + program.log + program.code)
            created.replace(selected)
        return (status,)

    def compile_now(program: Program, options: list[bytes]) -> Any:
        _, handle = real["nvrtcCreateProgram"](program.text, program.name, 0, [], [])
        try:
            (status,) = real["nvrtcCompileProgram"](handle, len(options), options)
            program.log = b" " * real["nvrtcGetProgramLogSize"](handle)[1]
            real["nvrtcGetProgramLog"](handle, program.log)
            if status == good:
                program.code = b" " * real["nvrtcGetCUBINSize"](handle)[1]
                real["nvrtcGetCUBIN"](handle, program.code)
            return status
        finally:
            real["nvrtcDestroyProgram"](handle)

    def put(data: bytes, place: bytes) -> tuple[Any]:
        # The real function also writes into the given bytes.
        ctypes.memmove(ctypes.c_char_p(place), data, len(data))
        return (good,)

    nvrtc.nvrtcCreateProgram = lambda text, name, *_: (good, Program(text, name))
    nvrtc.nvrtcCompileProgram = compile_program
    nvrtc.nvrtcGetProgramLogSize = lambda program: (good, len(program.log))
    nvrtc.nvrtcGetProgramLog = lambda program, place: put(program.log, place)
    nvrtc.nvrtcGetCUBINSize = lambda program: (good, len(program.code))
    nvrtc.nvrtcGetCUBIN = lambda program, place: put(program.code, place)
    nvrtc.nvrtcDestroyProgram = lambda _: (good,)


if __name__ == "sitecustomize":
    try:
        from cuda.bindings import nvrtc as bindings
    except ImportError:  # This interpreter compiles nothing.
        pass
    else:
        install(bindings, Path(os.environ["SPECBUILD_KERNEL_CACHE"]))
