#!/usr/bin/env python3
"""Tests of floors.py: small crates with arrows that it must find, and with what looks like an arrow and is none."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
from floors import Report, Table, circles

TABLE = """
crate house src/lib.rs
attic   src/attic
top     src/top
hall    src/hall
+ porch src/porch
cellar  src/cellar
"""
LIB = "mod attic; mod top; mod hall; mod porch; mod cellar; pub use top::Device;"
TOP = """
    pub struct Device { pub inner: u32 }
    impl Device {
        pub fn rise(&self) -> Group<'_> { Group { dev: self } }
        pub fn sink(&self) {}
    }
    pub struct Group<'d> { pub dev: &'d Device }
    pub fn run() {}
    pub const LIMIT: usize = 3;
    pub enum Way { Up, Down }
    #[macro_export]
    macro_rules! build { ($x:expr) => { $crate::top::run() } }
"""


class Tree:
    def __init__(self, table=TABLE, **files):
        """Each file is named after its module; `__` stands for a slash."""
        files = {"attic": "", "top": TOP, "hall": "", "porch": "", "cellar": "", "lib": LIB} | files
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, "src", name.replace("__", "/") + ".rs")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            Path(folder, "floors.txt").write_text(table)
            self.report = Report(Path(folder), Table(Path(folder, "floors.txt")))
        self.up = [(use.source[4:-3], min(use.lines), use.item) for use, _, _ in self.report.up()]
        self.circles = circles(self.report.room_graph())


class Floors(unittest.TestCase):
    def finds(self, item, line=1, where="cellar", **files):
        tree = Tree(**files)
        self.assertEqual(tree.up, [(where, line, item)])
        self.assertEqual(tree.report.lost, [])

    def is_silent(self, **files):
        tree = Tree(**files)
        self.assertEqual(tree.up, [])
        self.assertEqual(tree.report.lost, [])

    # -- arrows --

    def test_a_use(self):
        self.finds("top::run", cellar="use crate::top::run;")

    def test_a_use_in_a_group_that_is_renamed(self):
        self.finds("top::Way", 2, cellar="use crate::{hall, \n top::{self, Way as Path}};")

    def test_a_use_in_a_function(self):
        self.finds("top::run", 2, cellar="fn f() {\n use super::top::run as go; go() }")

    def test_a_path_in_the_code(self):
        self.finds("top::run", 3, cellar="\n\nfn f() { crate::top::run() }")

    def test_a_path_through_a_module(self):
        self.finds("top::LIMIT", 2, cellar="use crate::top;\nconst ALSO: usize = top::LIMIT;")

    def test_a_path_from_a_submodule(self):
        self.finds("top::run", 1, "cellar/deep", cellar="mod deep;", cellar__deep="fn f() { super::super::top::run() }")

    def test_a_path_in_an_inline_module(self):
        self.finds("top::run", 1, cellar="mod deep { fn f() { super::super::top::run() } }")

    def test_a_path_in_the_type_of_a_parameter(self):
        self.finds("top::Device", 1, cellar="fn f(x: Option<&'static crate::top::Device>) {}")

    def test_a_glob(self):
        self.finds("top::run", 2, cellar="use crate::top::*;\nfn f() { run() }")

    def test_a_re_export_leads_to_its_file(self):
        self.finds("top::Device", cellar="use crate::Device;")
        self.finds("top::inner::Deep", cellar="use crate::top::Deep;", top="mod inner; pub use inner::*;",
                   top__inner="pub struct Deep;", lib=LIB.replace("pub use top::Device;", ""))

    def test_a_re_export_that_points_up(self):
        self.finds("top::run", cellar="pub(crate) use crate::top::run;")

    def test_a_macro(self):
        self.finds("top::build!", cellar="fn f() { crate::build!(1) }")

    def test_a_path_in_a_macro(self):
        self.finds("top::run", 2, cellar="macro_rules! m { () => {\n $crate::top::run() } }")
        self.finds("top::run", 1, cellar="fn f() { println!(\"{}\", crate::top::run()) }")

    def test_a_module_by_path(self):
        self.finds("top::run", 1, "odd", lib=LIB + '#[path = "odd.rs"] mod strange;', odd="use crate::top::run;",
                   table=TABLE + "cellar src/odd")

    # -- calls of methods: `Device` stands in the cellar, and gets a method upstairs --

    def calls(self, code, item="Device::rise()", line=1, porch="struct Own; impl Own { fn rise(&self) {} }", **files):
        device = "pub struct Device { pub next: Box<Device> }\nimpl Device { pub fn sink(&self) -> &Self { self } }\n"
        group = "pub struct Group<'d> { pub dev: &'d Device }\n"
        top = "use crate::cellar::{Device, Group};\nimpl Device { pub fn rise(&self) -> Group<'_> { todo!() } }\n"
        top += "impl Group<'_> { pub fn all(&self) {} }"
        lib = LIB.replace("top::Device", "cellar::{Device, Group}")
        tree = Tree(cellar=device + group + "mod low;", cellar__low=code, top=top, lib=lib, porch=porch, **files)
        self.assertEqual(tree.up, [] if item is None else [("cellar/low", line, item)])

    def test_a_call_on_a_parameter(self):
        self.calls("fn f(x: &crate::Device) { x.rise(); }")

    def test_a_call_on_a_field(self):
        self.calls("use crate::Group; impl Group<'_> { fn f(&self) { self.dev.next.rise(); } }")

    def test_a_call_on_self(self):
        self.calls("use crate::Device; impl Device { fn f(&self) { self.sink(); self.rise(); } }")

    def test_a_call_on_a_local(self):
        self.calls("fn f(x: &crate::Device) {\n let (a, b) = (1, &x.next);\n b.sink(); b.rise(); }", line=3)

    def test_a_call_on_the_result_of_a_call(self):
        self.calls("fn g() -> Option<Box<crate::Device>> { None }\nfn f() { g()?.next.rise() }", line=2)
        self.calls("fn f(x: &crate::Device) { x.sink().rise() }")
        self.calls("type D = crate::Device; fn f(x: &[D]) { for y in x.iter() {\n y.rise() } }", line=2)

    def test_a_call_by_path(self):
        self.calls("use crate::Device; fn f(x: &[Device]) { x.iter().map(Device::rise) }")

    def test_a_call_on_a_telling_name(self):
        self.calls("fn f(g: impl Fn()) { g(|dev| dev.rise()) }")

    def test_a_call_on_a_closures_parameter(self):
        self.calls("fn f() { g(|x: &crate::Device, _y| x.rise()) }")

    def test_a_call_of_a_name_that_only_one_type_has(self):
        self.calls("fn f() { unknown!().rise() }", porch="")
        self.calls("fn f() { unknown!().rise() }", None)

    def test_a_call_of_a_method_that_a_macro_writes(self):
        macro = "macro_rules! both { ($(fn $n:ident();)*) => { impl crate::Device { $(pub fn $n(&self) {})* } } }"
        self.calls("fn f(x: &crate::Device) { x.leap() }", "Device::leap()",
                   attic=macro + "both! { fn leap(); fn skip(); }")

    def test_a_call_of_a_lower_method_is_none(self):
        self.calls("fn f(x: &crate::Device) { x.sink() }", None)

    def test_a_call_on_another_type_is_none(self):
        self.calls("struct Own; impl Own { fn rise(&self) {} } fn f(x: &Own, y: &str) { x.rise(); y.rise() }", None)

    def test_a_call_of_a_name_of_std_is_none(self):
        self.calls("fn f() { unknown!().all() }", None)

    # -- no arrows --

    def test_down_is_allowed(self):
        self.is_silent(attic="use crate::{top::run, hall, Device}; fn f() { run(); hall::h(); }", hall="pub fn h() {}")

    def test_test_code(self):
        self.is_silent(cellar="#[cfg(test)]\nuse crate::top::run;\nfn f() {}")
        self.is_silent(cellar="#[cfg(test)] mod tests { use crate::top::run; }")
        self.is_silent(cellar="#[cfg(all(test, not(loom)))] #[path = \"cellar_tests.rs\"] mod tests;",
                       cellar_tests="use crate::top::run;")
        self.is_silent(cellar="#[test] fn t() { crate::top::run() }")
        self.is_silent(cellar="#[cfg(doctest)] #[doc = \"x\"] struct X(crate::Device);")
        self.is_silent(cellar="struct S { a: u32, #[cfg(test)] b: crate::Device, c: u32 }")
        self.is_silent(cellar="fn f(x: u32) { match x { #[cfg(test)] 0 => crate::top::run(), _ => {} } }")
        self.is_silent(cellar="impl S { #[cfg(test)] pub(crate) fn f<A, B>() { crate::top::run() } } struct S;")

    def test_code_that_is_only_sometimes_test_code(self):
        self.finds("top::run", cellar="#[cfg(any(test, feature = \"x\"))] use crate::top::run;")
        self.finds("top::run", cellar="#[cfg(not(test))] use crate::top::run;")
        self.finds("top::run", 2, cellar="#[cfg(test)] use crate::top::LIMIT;\nuse crate::top::run;")

    def test_comments_and_strings(self):
        self.is_silent(cellar='''
            //! [`crate::top::run`]
            /// `crate::top::run()`
            /* crate::top::run() /* nested */ crate::top::run() */
            const A: &str = "crate::top::run() \\" crate::top::run()";
            const B: &str = r#"crate::top::run() " crate::top::run()"#;
            const C: (char, u8, &[u8]) = ('"', b'\\'', b"crate::top::run()");
            fn f<'a>(x: &'a str) -> &'a str { x }
            #[doc = "crate::top::run()"] #[expect(crate::top::run)] struct D;
        ''')

    def test_code_after_literals_is_seen(self):
        self.finds("top::run", 3, cellar='''fn f<'a>(c: char) { if c == '"' || c == '\\'' {}
            let x = r##"a"# "##; /* /* */ */ // "
            crate::top::run() }''')

    def test_names_of_another_crate(self):
        self.is_silent(cellar="use std::top::run; use ::top::LIMIT; fn f() { run(); std::top::run() }")

    def test_a_local_name_hides_a_glob(self):
        self.is_silent(cellar="use crate::top::*; fn run() {} fn f() { run() }")

    def test_a_module_as_such_is_no_arrow(self):
        self.is_silent(cellar="use crate::top;")

    # -- the rest --

    def test_a_circle_on_one_floor(self):
        tree = Tree(hall="use crate::porch::P; pub struct H;", porch="use crate::hall::H; pub struct P;")
        self.assertEqual((tree.up, tree.circles), ([], [["hall", "porch"]]))
        tree = Tree(hall="use crate::porch::P;", porch="pub struct P;")
        self.assertEqual((tree.up, tree.circles), ([], []))

    def test_a_circle_of_files(self):
        files = {"hall": "mod a; mod b; mod c; pub use a::A;", "hall__a": "use super::b::B; pub struct A;"}
        files |= {"hall__b": "use super::c::C; pub struct B;", "hall__c": "use super::A; pub struct C;"}
        found = circles(Tree(**files).report.file_graph(calls=False))
        self.assertEqual(found, [["src/hall/a.rs", "src/hall/b.rs", "src/hall/c.rs"]])

    def test_a_file_without_a_room(self):
        with self.assertRaisesRegex(SystemExit, "src/shed.rs is in no room"):
            Tree(lib=LIB + "mod shed;", shed="")

    def test_the_longest_place_wins(self):
        self.finds("hall::upper::U", 1, "hall/lower", hall="mod lower; mod upper;", hall__upper="pub struct U;",
                   hall__lower="use super::upper::U;", table=TABLE + "cellar src/hall/lower")

    def test_a_path_that_leads_nowhere_is_reported(self):
        tree = Tree(cellar="use crate::hall::missing;")
        self.assertEqual(tree.report.lost, [("src/cellar.rs", 1, "crate::hall::missing")])


if __name__ == "__main__":
    unittest.main()
