//! Snapshots as files: JSON, and one HTML page that draws from it.
//!
//! Users call these methods of [`MemorySnapshot`]. The page is `viewer.html`, with the snapshots' JSON in place of an
//! empty list; the viewer's script does all drawing. `.ci/viewer.mjs` tests that script.
//!
//! Invariant: the page loads nothing, and no name in a snapshot can end the element that holds the JSON.

use super::snapshot::MemorySnapshot;
use crate::error::{Error, Result, op_site::OpSite};
use std::{fmt, fs, panic::Location, path::Path, slice};

/// Pages and JSON need the feature `insight`, which is a default feature.
impl MemorySnapshot {
    /// A page with the picture, the counters and the call sites: one file that needs only a browser.
    pub fn to_html(&self) -> String {
        Self::page(slice::from_ref(self))
    }

    /// One page for several devices.
    ///
    /// ```
    /// # use gpu_pool::MemorySnapshot;
    /// assert!(MemorySnapshot::page(&[]).starts_with("<!doctype html>"));
    /// ```
    pub fn page(devices: &[MemorySnapshot]) -> String {
        let json = serde_json::to_string(devices).expect("plain data with text for keys");
        // JSON has these characters only inside of strings. `<` could begin `</script>`; scripts could take the others
        // for ends of lines.
        let json = json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
        include_str!("viewer.html").replacen("[]</script>", &(json + "</script>"), 1)
    }

    /// The snapshot as JSON, which [`from_json`](Self::from_json) reads.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data with text for keys")
    }

    /// Reads a snapshot that [`to_json`](Self::to_json) wrote.
    ///
    /// [`Error::InvalidArgument`] says where the text is not a snapshot.
    #[track_caller]
    pub fn from_json(text: &str) -> Result<Self> {
        let _here = OpSite::here("MemorySnapshot::from_json");
        let site = Location::caller();
        serde_json::from_str(text).map_err(|e| Error::invalid_at(site, "snapshot", e))
    }

    /// Writes the snapshot to a file. The extension chooses the format: `.html` or `.json`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other extensions, and when the file cannot be written; it names the file.
    #[track_caller]
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let _here = OpSite::here("MemorySnapshot::write");
        let (path, site) = (path.as_ref(), Location::caller());
        let failed =
            |why: &dyn fmt::Display| Error::invalid_at(site, "snapshot", format_args!("{}: {why}", path.display()));
        let text = match path.extension().and_then(|e| e.to_str()) {
            Some("html" | "htm") => self.to_html(),
            Some("json") => self.to_json(),
            _ => return Err(failed(&"the name must end in .html or .json")),
        };
        fs::write(path, text).map_err(|e| failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        memory::insight::{
            HOW_TO_RECORD,
            site::CallSite,
            snapshot::{BlockInfo, BlockState, ChunkInfo, EventKind, MemoryEvent, tests::example},
        },
        testing::texts,
    };
    use proptest::prelude::*;

    /// The JSON of a page: everything up to where a browser ends the element.
    fn embedded(page: &str) -> &str {
        let (_, after) = page.split_once("id=\"snapshots\">").unwrap();
        &after[..after.to_ascii_lowercase().find("</script").unwrap()]
    }

    /// Names of files and operations may be anything, and so may what a JSON file says.
    #[test]
    fn names_do_not_become_code() {
        let mut snapshot = example();
        let evil =
            "</title></sCript ><script>alert(1)</script><!--<script><img src=x onerror=\"alert(2)\">\u{2028}&amp;";
        for site in snapshot.events.iter_mut().filter_map(|event| event.site.as_mut()) {
            (site.op, site.file) = (evil.into(), evil.into());
        }
        let page = snapshot.to_html();
        assert_eq!(serde_json::from_str::<[MemorySnapshot; 1]>(embedded(&page)).unwrap(), [snapshot]);
        assert_eq!(page.replacen(embedded(&page), "[]", 1), include_str!("viewer.html"));
        assert!(!embedded(&page).contains(['<', '\u{2028}', '\u{2029}']));
    }

    /// The page's policy forbids all loads, too.
    #[test]
    fn the_viewer_needs_nothing_else() {
        let viewer = include_str!("viewer.html");
        for outside in
            ["http:", "https:", "//cdn", "src=", "href=", "@import", "@font-face", "url(\"", "fetch(", "import("]
        {
            assert!(!viewer.contains(outside), "{outside}");
        }
        assert!(viewer.contains("content=\"default-src 'none';"));
        assert!(viewer.contains(HOW_TO_RECORD));
    }

    fn any_snapshot() -> impl Strategy<Value = MemorySnapshot> {
        use EventKind::*;
        let kinds = prop::sample::select(vec![Allocated, Freed, FreedRemotely, Mapped, Unmapped, OutOfMemory, Trimmed]);
        let states = prop::sample::select(vec![BlockState::Live, BlockState::Free, BlockState::Pending]);
        // Mostly small numbers that coincide, sometimes numbers that no pool would have.
        let number = || prop_oneof![8 => 0u64..64, 1 => any::<u64>(), 1 => Just(u64::MAX)];
        let named = |(op, line): (String, u32)| CallSite { op: op.into(), file: "<&>.rs".into(), line, column: 1 };
        let name = prop_oneof!["[<>&\"'a-c]{0,3}", "(</script|<!--|<SCRIPT>|\u{2028}|\u{2029}|\0|\\\\|\\[\\]){0,3}"];
        let who = prop::option::of((name, 0u32..3).prop_map(named)).boxed();
        let event = (number(), kinds, number(), number(), number(), number(), who.clone()).prop_map(
            |(micros, kind, address, bytes, requested, stream, site)| MemoryEvent {
                micros,
                kind,
                address,
                bytes,
                requested,
                stream,
                site,
            },
        );
        let block = (number(), number(), states, prop::option::of(number()), who).prop_map(
            |(address, bytes, state, class, site)| BlockInfo {
                address,
                bytes,
                state,
                class,
                site,
                ..Default::default()
            },
        );
        let chunk = (number(), number()).prop_map(|(address, bytes)| ChunkInfo { address, bytes });
        let many = 0..40usize;
        let lists = (prop::collection::vec(chunk, many.clone()), prop::collection::vec(block, many.clone()));
        (lists, prop::collection::vec(event, many), number(), any::<bool>()).prop_map(
            |((chunks, blocks), events, taken_at, recorded)| MemorySnapshot {
                chunks,
                blocks,
                events,
                taken_at,
                recorded,
                ..Default::default()
            },
        )
    }

    proptest! {
        #[test]
        fn json_is_read_back_as_it_was(snapshot in any_snapshot()) {
            prop_assert_eq!(MemorySnapshot::from_json(&snapshot.to_json()).unwrap(), snapshot);
        }

        #[test]
        fn a_page_is_the_viewer_with_the_json(snapshots in prop::collection::vec(any_snapshot(), 0..3)) {
            let page = MemorySnapshot::page(&snapshots);
            let json = embedded(&page);
            prop_assert_eq!(serde_json::from_str::<Vec<MemorySnapshot>>(json).unwrap(), snapshots);
            prop_assert_eq!(page.replacen(json, "[]", 1), include_str!("viewer.html"));
        }
    }

    proptest! {
        #![proptest_config(texts::cases(64))]

        /// A snapshot that can be read can be displayed, whatever it says.
        #[test]
        fn any_text_is_a_snapshot_or_none(text in texts::like(SNAPSHOTS)) {
            if let Ok(snapshot) = MemorySnapshot::from_json(&text) {
                prop_assert_eq!(&MemorySnapshot::from_json(&snapshot.to_json()).unwrap(), &snapshot);
                prop_assert!(!snapshot.to_html().is_empty() && !snapshot.to_string().is_empty());
            }
        }
    }

    static SNAPSHOTS: &[&str] = &[
        r#"{"device":1,"recorded":true,"stats":{"in_use":7},"chunks":[{"address":64,"bytes":8}],"dropped_events":3}"#,
        concat!(
            r#"{"blocks":[{"address":64,"bytes":4,"state":"live","#,
            r#""site":{"op":"upload","file":"a.rs","line":1,"column":9}}]}"#,
        ),
        concat!(
            r#"{"taken_at":9,"events":[{"micros":5,"kind":"freed_remotely","#,
            r#""address":64,"bytes":4,"requested":3,"stream":2}]}"#,
        ),
    ];

    /// Nested as deep as memory allows: an error, not the end of the stack.
    #[test]
    fn json_that_is_nested_without_end() {
        for open in ["[", "{\"novelty\":", "{\"blocks\":[{\"novelty\":["] {
            assert!(MemorySnapshot::from_json(&open.repeat(100_000)).is_err());
        }
    }

    /// Names that scripts may rely on.
    #[test]
    fn json_names() {
        let value: serde_json::Value = serde_json::from_str(&example().to_json()).unwrap();
        assert_eq!(value["events"][3]["kind"], "freed_remotely");
        assert_eq!(value["events"][3]["site"]["op"], "upload");
        assert_eq!(value["events"][3]["site"]["line"], 10);
        assert_eq!(value["blocks"][2]["state"], "pending");
        assert_eq!(value["stats"]["in_use"], 5 << 20);
        // Fields that a later version omits or adds do not make the file unreadable.
        let read = MemorySnapshot::from_json(r#"{"device": 4, "stats": {"in_use": 7}, "novelty": []}"#).unwrap();
        assert_eq!((read.device, read.stats.in_use, read.blocks.len()), (4, 7, 0));
        assert!(matches!(MemorySnapshot::from_json("{]"), Err(Error::InvalidArgument { .. })));
    }

    #[test]
    fn the_extension_decides() {
        let dir = std::env::temp_dir().join(format!("gpu-pool-snapshot-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let snapshot = example();
        for (name, begins) in [("a.html", "<!doctype html>"), ("a.htm", "<!doctype html>"), ("a.json", "{")] {
            snapshot.write(dir.join(name)).unwrap();
            assert!(fs::read_to_string(dir.join(name)).unwrap().starts_with(begins), "{name}");
        }
        for (name, says) in [("a", ".html or .json"), ("a.svg", ".html or .json"), ("missing/a.html", "")] {
            let error = snapshot.write(dir.join(name)).unwrap_err();
            let named = |why: &str| why.contains(name) && why.contains(says);
            assert!(matches!(&error, Error::InvalidArgument { why, .. } if named(why)), "{error}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
