//! Text in pages. Names of files and operations are the user's, and may hold anything.

use std::fmt::{self, Write};

/// Shows `T` as text of HTML and XML, also between double quotes.
pub(crate) struct Escaped<T>(pub(crate) T);

impl<T: fmt::Display> fmt::Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Filter(f), "{}", self.0)
    }
}

struct Filter<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Filter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '&' => self.0.write_str("&amp;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                // XML has no way to write them.
                c if c < ' ' && c != '\n' && c != '\t' => self.0.write_char('\u{fffd}')?,
                '\u{fffe}' | '\u{ffff}' => self.0.write_char('\u{fffd}')?,
                c => self.0.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Asserts that every tag is closed in order, attributes are quoted and no stray `<` or `&` is left. What it accepts is
/// stricter than HTML: the pages are written as if they were XML.
#[cfg(test)]
#[track_caller]
pub(crate) fn assert_well_formed(text: &str) {
    let mut open = Vec::<&str>::new();
    let mut rest = text.strip_prefix("<!doctype html>").unwrap_or(text);
    while let Some(at) = rest.find('<') {
        assert_entities(&rest[..at]);
        rest = &rest[at + 1..];
        let (tag, after) = tag(rest);
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(
                open.pop(),
                Some(name),
                "</{name}> closes another one, before {:?}",
                &rest[..rest.len().min(60)]
            );
            continue;
        }
        let (tag, closed) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, attributes) = tag.split_once([' ', '\n']).unwrap_or((tag, ""));
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric()) && !name.is_empty(), "<{tag}>");
        assert_attributes(attributes);
        if name == "script" || name == "style" {
            let end = format!("</{name}>");
            rest = rest.split_once(&end).unwrap_or_else(|| panic!("<{name}> is not closed")).1;
        } else if !closed && !["meta", "br"].contains(&name) {
            open.push(name);
        }
    }
    assert_entities(rest);
    assert!(open.is_empty(), "never closed: {open:?}");
}

/// Up to the `>` that is not between quotes.
#[cfg(test)]
fn tag(text: &str) -> (&str, &str) {
    let mut quoted = false;
    let end = text.find(|c| {
        quoted ^= c == '"';
        assert!(c != '<', "< in a tag: {:?}", &text[..text.len().min(60)]);
        c == '>' && !quoted
    });
    let end = end.expect("a tag ends");
    (&text[..end], &text[end + 1..])
}

#[cfg(test)]
fn assert_attributes(text: &str) {
    let mut rest = text.trim();
    let mut seen = std::collections::HashSet::new();
    while !rest.is_empty() {
        let (name, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("no value: {rest:?}"));
        let well_named = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        assert!(well_named && !name.is_empty() && seen.insert(name), "{name:?} in {text:?}");
        let (value, after) = value.split_once('"').expect("a value ends");
        assert_entities(value);
        assert!(after.is_empty() || after.starts_with([' ', '\n']), "{after:?}");
        rest = after.trim();
    }
}

#[cfg(test)]
fn assert_entities(text: &str) {
    for (at, _) in text.match_indices('&') {
        let known = ["&lt;", "&gt;", "&amp;", "&quot;", "&#39;"];
        assert!(known.iter().any(|entity| text[at..].starts_with(entity)), "a bare & in {text:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stays_a_tag() {
        let shown = Escaped("<script>alert(\"a\" & 'b')</script>\u{0}\u{1b}\n").to_string();
        let expected = "&lt;script&gt;alert(&quot;a&quot; &amp; &#39;b&#39;)&lt;/script&gt;\u{fffd}\u{fffd}\n";
        assert_eq!(shown, expected);
        assert_eq!(Escaped(17.5).to_string(), "17.5");
    }

    #[test]
    fn the_check_of_the_tests_is_one() {
        assert_well_formed("<!doctype html><p class=\"a b\">x &lt; y<br/></p><script>if (a < b && c) {}</script>");
        let broken = [
            "<p>",
            "<p></i></p>",
            "<p a=b></p>",
            "<p>a & b</p>",
            "<p>a < b</p>",
            "</p>",
            "<p a=\"1\" a=\"2\"></p>",
            "<p",
        ];
        for text in broken {
            assert!(std::panic::catch_unwind(|| assert_well_formed(text)).is_err(), "{text}");
        }
    }
}
