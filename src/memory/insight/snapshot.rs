//! A device's memory pool as a value.

use super::{
    classes::MemoryClasses,
    page, picture,
    site::{CallSite, Holder, holders},
    units::Micros,
};
use crate::{
    error::{Error, Result},
    memory::stats::MemoryStats,
};
use std::{fmt, fs, panic::Location, path::Path, slice};

/// What a device's memory pool holds and, while recording is on, what has happened in it. As text with `Display`, as a
/// page with [`to_html`](Self::to_html), as data with `to_json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The device's ordinal in the pool.
    pub device: usize,
    /// When it was taken, in microseconds since the pool was built.
    pub taken_at: u64,
    /// Whether recording was on. Without it there are no call sites and no events.
    pub recorded: bool,
    /// The pool's counters.
    pub stats: MemoryStats,
    /// Memory that the driver gave.
    pub chunks: Vec<ChunkInfo>,
    /// What the chunks are divided into.
    pub blocks: Vec<BlockInfo>,
    /// The recent past, oldest first.
    pub events: Vec<MemoryEvent>,
    /// How many older events were forgotten.
    pub dropped_events: u64,
}

/// Memory that the driver gave in one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ChunkInfo {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// A piece of a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct BlockInfo {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// Bytes that its holder asked for; 0 if it is not live, or unknown.
    pub requested: u64,
    /// Whether it is in use.
    pub state: BlockState,
    /// The block size of its slab; none for a large block, which has the size that it was cut to.
    pub class: Option<u64>,
    /// The stream that it was last handed out for.
    pub stream: Option<u64>,
    /// Who asked for it.
    pub site: Option<CallSite>,
    /// When it was handed out, in microseconds since the pool was built.
    pub since: Option<u64>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum BlockState {
    /// Somebody holds it.
    Live,
    /// Nobody does, and nothing that is queued uses it.
    #[default]
    Free,
    /// It was freed, but queued work still uses it.
    Pending,
}

/// Something that happened in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MemoryEvent {
    /// When the device's own thread did or learned it, in microseconds since the pool was built.
    pub micros: u64,
    /// What it was.
    pub kind: EventKind,
    /// Where; 0 for what has no place.
    pub address: u64,
    /// How much.
    pub bytes: u64,
    /// Bytes that the block's holder asked for; 0 for chunks.
    pub requested: u64,
    /// The stream that the block was handed out for; 0 for chunks.
    pub stream: u64,
    /// Who had asked for the memory (of a free, too) or for what was refused.
    pub site: Option<CallSite>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "insight", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EventKind {
    /// A block was handed out.
    Allocated,
    /// A block was dropped on the device's own thread.
    Freed,
    /// A block was dropped on another thread, and the device's own thread has learned of it.
    FreedRemotely,
    /// The driver gave a chunk.
    Mapped,
    /// The driver got a chunk back.
    Unmapped,
    /// A request was refused; `bytes` of it.
    OutOfMemory,
    /// The pool was asked to shrink, and gave back `bytes`.
    Trimmed,
}

impl MemorySnapshot {
    /// Live blocks by call site, the most bytes first.
    pub fn holders(&self) -> Vec<Holder> {
        let live = self.blocks.iter().filter(|block| block.state == BlockState::Live);
        holders(live.map(|block| (block.site.clone(), block.bytes)))
    }

    /// Blocks by size class.
    pub fn classes(&self) -> MemoryClasses {
        MemoryClasses::of(&self.blocks)
    }

    /// A page with the picture, the counters and the call sites. It is one file that needs nothing but a browser.
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
        page::page(devices)
    }

    /// The picture alone: address space over time, below curves of live and reserved bytes.
    pub fn to_svg(&self) -> String {
        picture::standalone(self)
    }

    /// The snapshot as JSON, which [`from_json`](Self::from_json) reads. Only with feature `insight` (a default one).
    #[cfg(feature = "insight")]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data with text for keys")
    }

    /// Reads what [`to_json`](Self::to_json) wrote, to look at it elsewhere. Only with feature `insight` (a default one).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] says where it is no snapshot.
    #[cfg(feature = "insight")]
    #[track_caller]
    pub fn from_json(text: &str) -> Result<Self> {
        let site = Location::caller();
        serde_json::from_str(text).map_err(|e| Error::invalid_at(site, "snapshot", e))
    }

    /// Writes the snapshot to a file as its extension says: `.html`, `.svg`, or `.json` (with feature `insight`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other extensions, and when the file cannot be written; it names the file.
    #[track_caller]
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, site) = (path.as_ref(), Location::caller());
        let failed =
            |why: &dyn fmt::Display| Error::invalid_at(site, "snapshot", format_args!("{}: {why}", path.display()));
        let text = match path.extension().and_then(|e| e.to_str()) {
            Some("html" | "htm") => self.to_html(),
            Some("svg") => self.to_svg(),
            #[cfg(feature = "insight")]
            Some("json") => self.to_json(),
            #[cfg(not(feature = "insight"))]
            Some("json") => return Err(failed(&"JSON needs the crate's feature `insight`")),
            _ => return Err(failed(&"the name must end in .html, .svg or .json")),
        };
        fs::write(path, text).map_err(|e| failed(&e))
    }
}

/// The counters, and the ten call sites that hold most.
impl fmt::Display for MemorySnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}, {} after the pool was built\n{}", self.device, Micros(self.taken_at), self.stats)?;
        let holders = if self.recorded { self.holders() } else { Vec::new() };
        for holder in holders.iter().take(10) {
            write!(f, "\n  {holder}")?;
        }
        if holders.len() > 10 {
            write!(f, "\n  ... and {} more call sites", holders.len() - 10)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{super::site::site, *};
    #[cfg(feature = "insight")]
    use crate::testing::texts;
    use proptest::prelude::*;

    /// A short life: two chunks, one of them given back; a block that was there before, one that came and went, one
    /// that was freed and is pending, one that stays; a refusal.
    pub(crate) fn example() -> MemorySnapshot {
        use EventKind::*;
        const MIB: u64 = 1 << 20;
        let event = |micros, kind, address, bytes, who: Option<CallSite>| {
            let requested = if who.is_some() { bytes - 1 } else { 0 };
            MemoryEvent { micros, kind, address, bytes, requested, stream: 2, site: who }
        };
        let block = |address, bytes, state, site| BlockInfo { address, bytes, state, site, ..BlockInfo::default() };
        let (a, b) = (site("upload", 10), site("Vec<f32>::zeros & co \"quoted\"", 20));
        MemorySnapshot {
            device: 1,
            taken_at: 5000,
            recorded: true,
            stats: MemoryStats { in_use: 5 * MIB, reserved: 8 * MIB, peak_reserved: 40 * MIB, ..Default::default() },
            chunks: vec![ChunkInfo { address: 64 * MIB, bytes: 8 * MIB }],
            blocks: vec![
                block(64 * MIB, MIB, BlockState::Live, None),
                block(65 * MIB, 4 * MIB, BlockState::Live, Some(b.clone())),
                block(69 * MIB, 2 * MIB, BlockState::Pending, None),
                block(71 * MIB, MIB, BlockState::Free, None),
            ],
            events: vec![
                event(100, Mapped, 256 * MIB, 32 * MIB, None),
                event(200, Allocated, 256 * MIB, 16 * MIB, Some(a.clone())),
                event(900, Allocated, 65 * MIB, 4 * MIB, Some(b.clone())),
                event(1000, FreedRemotely, 256 * MIB, 16 * MIB, Some(a.clone())),
                event(1100, Unmapped, 256 * MIB, 32 * MIB, None),
                event(1200, Trimmed, 0, 32 * MIB, None),
                event(1300, OutOfMemory, 0, 1 << 40, Some(a.clone())),
                event(1400, Freed, 69 * MIB, 2 * MIB, Some(a)),
            ],
            dropped_events: 3,
        }
    }

    pub(crate) fn any_snapshot() -> impl Strategy<Value = MemorySnapshot> {
        use EventKind::*;
        let kinds = prop::sample::select(vec![Allocated, Freed, FreedRemotely, Mapped, Unmapped, OutOfMemory, Trimmed]);
        let states = prop::sample::select(vec![BlockState::Live, BlockState::Free, BlockState::Pending]);
        // Mostly small numbers that meet each other, sometimes such as no pool would have.
        let number = || prop_oneof![8 => 0u64..64, 1 => any::<u64>(), 1 => Just(u64::MAX)];
        let named = |(op, line): (String, u32)| CallSite { op: op.into(), file: "<&>.rs".into(), line, column: 1 };
        let who = prop::option::of(("[<>&\"'a-c]{0,3}", 0u32..3).prop_map(named)).boxed();
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

    #[cfg(feature = "insight")]
    proptest! {
        #[test]
        fn json_is_read_back_as_it_was(snapshot in any_snapshot()) {
            prop_assert_eq!(MemorySnapshot::from_json(&snapshot.to_json()).unwrap(), snapshot);
        }
    }

    #[cfg(feature = "insight")]
    proptest! {
        #![proptest_config(texts::cases(64))]

        /// What is read can be looked at, whatever it says.
        #[test]
        fn any_text_is_a_snapshot_or_none(text in texts::like(SNAPSHOTS)) {
            if let Ok(snapshot) = MemorySnapshot::from_json(&text) {
                prop_assert_eq!(&MemorySnapshot::from_json(&snapshot.to_json()).unwrap(), &snapshot);
                let (page, picture, words) = (snapshot.to_html(), snapshot.to_svg(), snapshot.to_string());
                prop_assert!(!page.is_empty() && !picture.is_empty() && !words.is_empty());
            }
        }
    }

    #[cfg(feature = "insight")]
    static SNAPSHOTS: &[&str] = &[
        r#"{"device":1,"recorded":true,"stats":{"in_use":7},"chunks":[{"address":64,"bytes":8}],"dropped_events":3}"#,
        r#"{"blocks":[{"address":64,"bytes":4,"state":"live","site":{"op":"upload","file":"a.rs","line":1,"column":9}}]}"#,
        r#"{"taken_at":9,"events":[{"micros":5,"kind":"freed_remotely","address":64,"bytes":4,"requested":3,"stream":2}]}"#,
    ];

    /// Nested as deep as memory allows: an error, not the end of the stack.
    #[cfg(feature = "insight")]
    #[test]
    fn json_that_is_nested_without_end() {
        for open in ["[", "{\"novelty\":", "{\"blocks\":[{\"novelty\":["] {
            assert!(MemorySnapshot::from_json(&open.repeat(100_000)).is_err());
        }
    }

    /// Names that scripts may rely on.
    #[cfg(feature = "insight")]
    #[test]
    fn json_names() {
        let value: serde_json::Value = serde_json::from_str(&example().to_json()).unwrap();
        assert_eq!(value["events"][3]["kind"], "freed_remotely");
        assert_eq!(value["events"][3]["site"]["op"], "upload");
        assert_eq!(value["events"][3]["site"]["line"], 10);
        assert_eq!(value["blocks"][2]["state"], "pending");
        assert_eq!(value["stats"]["in_use"], 5 << 20);
        // What a later version leaves out or adds does not make the file unreadable.
        let read = MemorySnapshot::from_json(r#"{"device": 4, "stats": {"in_use": 7}, "novelty": []}"#).unwrap();
        assert_eq!((read.device, read.stats.in_use, read.blocks.len()), (4, 7, 0));
        assert!(matches!(MemorySnapshot::from_json("{]"), Err(Error::InvalidArgument { .. })));
    }

    #[test]
    fn in_words() {
        let text = example().to_string();
        assert!(text.starts_with("device 1, 5.00 ms after the pool was built\nin use          5.0 MiB"), "{text}");
        let holders = "\n     4.0 MiB in 1 block      Vec<f32>::zeros & co \"quoted\" at src/train.rs:20:9\
                       \n     1.0 MiB in 1 block      call site not recorded";
        assert!(text.ends_with(holders), "{text}");
    }

    #[test]
    fn the_extension_decides() {
        let dir = std::env::temp_dir().join(format!("gpu-pool-snapshot-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let snapshot = example();
        for (name, begins) in [("a.html", "<!doctype html>"), ("a.svg", "<svg "), ("a.json", "{")] {
            match snapshot.write(dir.join(name)) {
                Ok(()) => assert!(fs::read_to_string(dir.join(name)).unwrap().starts_with(begins), "{name}"),
                Err(e) => assert!(name == "a.json" && !cfg!(feature = "insight"), "{e}"),
            }
        }
        for name in ["a", "a.png", "missing/a.html"] {
            let error = snapshot.write(dir.join(name)).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument { why, .. } if why.contains(name)), "{error}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
