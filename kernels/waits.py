"""Whether a kernel, as PTX, waits for the kernel before it on its stream before it does anything that can be seen.

    python3 kernels/waits.py        tests of this file itself

Every path from the start of an entry is followed up to `griddepcontrol.wait`. On the way there are computations,
parameters, shared memory, and barriers of the block; anything else is an error, so that a new instruction is one until
somebody has thought about it.
"""

import re

WAIT = "griddepcontrol.wait"

# Instructions that touch nothing but registers, and a block's barriers.
HARMLESS = set(
    "abs add addc and bar barrier bfe bfi bfind brev clz cnot copysign cvt cvta div ex2 fma lg2 lop3 mad mad24 max min "
    "mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shfl shl shr slct sqrt sub subc vote "
    "xor".split()
)
# Memory that nobody else sees.
PRIVATE = {"param", "shared", "const", "local"}


def entries(ptx):
    """(name, body) of every entry."""
    return re.findall(r"^\.visible \.entry (\w+)\(.*?^\{\n(.*?)^\}", ptx, re.M | re.S)


def statements(body):
    """Instructions in order, and labels as they are, with their colon."""
    body = re.sub(r"//.*", "", body)
    body = re.sub(r"^\s*(\$\w+:)", r";\1;", body, flags=re.M)
    # Braces of scopes stand before instructions; those of vectors are within.
    parts = (" ".join(part.split()).lstrip("{} ") for part in body.split(";"))
    return [part for part in parts if part and not part.startswith(".")]


def harmless(instruction):
    head, *rest = instruction.split()[0].split(".")
    if head in ("ld", "st"):
        return not PRIVATE.isdisjoint(rest)
    return head in HARMLESS


def before_wait(body):
    """The first thing found that some thread may do before it has waited; None where all wait first."""
    code = statements(body)
    place = {part[:-1]: at for at, part in enumerate(code) if part.endswith(":")}
    todo, seen = [0], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at == len(code):
            return "the end"
        instruction = code[at]
        guard = re.match(r"@!?%?\w+ ", instruction)
        if guard:
            instruction = instruction[guard.end() :]
        if instruction == WAIT and not guard:
            continue
        branch = re.match(r"bra(?:\.uni)? (\S+)$", instruction)
        if branch:
            todo.append(place[branch[1]])
            if guard:
                todo.append(at + 1)
        elif instruction.endswith(":") or instruction == WAIT or harmless(instruction):
            todo.append(at + 1)
        else:
            return code[at]
    return None


def test():
    ld, st, bra, end = "ld.global.u32 %r1, [%rd1];", "st.shared.u32 [%r2], %r1;", "@%p1 bra $L__1;", "ret;"
    good = [
        f"{WAIT}; {ld} {end}",
        f".reg .pred %p<2>;\nld.param.u64 %rd1, [a]; // {ld}\n{bra} {st}\n$L__1:\n{WAIT}; {ld} {end}",
        f"$L__1:\n{st} {bra} {{ {WAIT}; }} {ld} {end}",
        f"{bra} {WAIT}; {ld} {end}\n$L__1:\n{WAIT}; {end}",
        f"ld.param.v2.u32 {{%r1, %r2}}, [a]; {WAIT}; {end}",
    ]
    bad = {
        f"{ld} {WAIT}; {end}": ld,
        f"{bra} {WAIT};\n$L__1:\n{ld} {end}": ld,
        f"@%p1 {WAIT}; {end}": end,
        f"{bra} {WAIT}; {ld} {end}\n$L__1:\n{end}": end,
        f"@%p1 {end} {WAIT}; {end}": f"@%p1 {end}",
        f"ld.u32 %r1, [%rd1]; {WAIT}; {end}": "ld.u32 %r1, [%rd1];",
        f"atom.global.add.u32 %r1, [%rd1], 1; {WAIT}; {end}": "atom.global.add.u32 %r1, [%rd1], 1;",
        f"call.uni f, (); {WAIT}; {end}": "call.uni f, ();",
        f"brx.idx %r1, ts; {WAIT}; {end}": "brx.idx %r1, ts;",
        f"{st}": "the end;",
    }
    for body in good:
        assert before_wait(body) is None, (body, before_wait(body))
    for body, wrong in bad.items():
        assert before_wait(body) == wrong.rstrip(";"), (body, before_wait(body))
    assert entries(".visible .entry a(\n.param .u64 x\n)\n.maxntid 512, 1, 1\n{\nret;\n\n}\n") == [("a", "ret;\n\n")]


if __name__ == "__main__":
    test()
    print("kernels/waits.py: right")
