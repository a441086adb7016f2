//! The model of inboxes: the table for the kernels' source, trips by a simulation, and the limits that follow.

use super::{LINK, TRIP, most_in_one_trip};
use crate::{
    collective::{
        algorithm::{inbox, slots},
        case::Bulk,
    },
    fabric::{
        layout::{BLOCKS, PadLayout},
        plan::slice,
        tiling::{GRAIN, Tiling},
    },
};
use std::fmt::Write;

const MB: usize = 1 << 20;
/// Nanoseconds of a kernel in a graph that sends nothing.
const START: usize = TRIP;
/// Bytes of a unit, which is polled whole.
const UNIT: usize = 16;

/// What one member does in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traffic {
    /// Units that it stores to peers.
    sent: usize,
    /// Units that it takes: it polls each of them, at least once, and wipes it.
    taken: usize,
    /// Stores that wait for each other, one after the other, until the last member's kernel ends.
    trips: usize,
}

impl Traffic {
    /// Of member `me` of `members`, where every member sends `each` bytes to each that receives. Who does not gets a
    /// unit, as a sign of life.
    fn in_one_trip(each: usize, members: usize, me: usize, receives: impl Fn(usize) -> bool) -> Traffic {
        let to = |rank| if receives(rank) { each.div_ceil(UNIT) } else { 1 };
        let sent = (0..members).filter(|&rank| rank != me).map(to).sum();
        Traffic { sent, taken: (members - 1) * to(me), trips: 1 }
    }

    /// Of member `me`, through slots: slice `b`, of so many bytes, goes to member `b`, who adds it up. Then the sums go
    /// to all, if they `return`. A block has up to `pieces` pieces of a slice.
    fn through_slots(slices: &[usize], me: usize, pieces: usize, returns: bool) -> Traffic {
        let units = |bytes: &usize| bytes.div_ceil(UNIT);
        let (peers, own) = (slices.len() - 1, units(&slices[me]));
        let others = slices.iter().map(units).sum::<usize>() - own;
        // A block begins a step when its peers have told that they have taken what was in the slots. The last trip is
        // that of the last such word.
        match returns {
            true => Traffic { sent: others + peers * own, taken: peers * own + others, trips: pieces + 2 },
            false => Traffic { sent: others, taken: peers * own, trips: 2 + (pieces - 1) / 2 },
        }
    }

    /// How long it takes: trips, and what goes over the link.
    fn nanoseconds(self) -> usize {
        START + self.trips * TRIP + self.sent.max(self.taken) * UNIT / LINK
    }
}

/// A call of `inbox` or `slots` with elements of four bytes.
struct Call {
    kind: &'static str,
    pieced: bool,
    root: usize,
    /// Elements of each member's slice.
    counts: Vec<usize>,
}

impl Call {
    fn of(&self, me: usize) -> Traffic {
        let members = self.counts.len();
        let total: usize = self.counts.iter().sum();
        let slices: Vec<usize> = self.counts.iter().map(|count| 4 * count).collect();
        match (self.pieced, self.kind) {
            // In the check, slots have 256 bytes, and one block works.
            (true, "ALL_REDUCE") if members == 2 => {
                Traffic::through_slots(&[4 * total; 2], me, (4 * total).div_ceil(256), false)
            }
            (true, kind) => {
                let pieces = slices.iter().max().unwrap().div_ceil(256);
                Traffic::through_slots(&slices, me, pieces, kind == "ALL_REDUCE")
            }
            (false, "ALL_REDUCE") => Traffic::in_one_trip(4 * total, members, me, |_| true),
            (false, "REDUCE") => Traffic::in_one_trip(4 * total, members, me, |rank| rank == self.root),
            (false, _) => Traffic::in_one_trip(slices[0], members, me, |_| true),
        }
    }

    /// The fields of `Row` in `check.cpp`.
    fn row(&self) -> String {
        let all: Vec<Traffic> = (0..self.counts.len()).map(|me| self.of(me)).collect();
        let list = |of: &dyn Fn(usize) -> usize| {
            (0..all.len()).map(|rank| of(rank).to_string()).collect::<Vec<_>>().join(", ")
        };
        let Call { kind, pieced, root, counts } = self;
        format!(
            "{{{kind}, {pieced}, {root}, {{{}}}, {{{}}}, {{{}}}, {}}},",
            list(&|rank| counts[rank]),
            list(&|rank| all[rank].sent),
            list(&|rank| all[rank].taken),
            all[0].trips
        )
    }
}

/// The calls of the table: two to eight members; a byte or two of a unit, units, what is not whole, empty parts.
fn calls() -> Vec<Call> {
    let mut all = Vec::new();
    for members in 2..=8 {
        let parts =
            |len: usize| (0..members).map(|rank| slice(rank, members, len, GRAIN / 4).len()).collect::<Vec<_>>();
        for len in [3, 301] {
            let root = len % members;
            all.push(Call { kind: "ALL_REDUCE", pieced: false, root, counts: parts(len) });
            all.push(Call { kind: "REDUCE", pieced: false, root, counts: parts(len) });
            all.push(Call { kind: "REDUCE_SCATTER", pieced: false, root, counts: vec![len; members] });
        }
        for len in [67, 900] {
            all.push(Call { kind: "ALL_REDUCE", pieced: true, root: 0, counts: parts(len) });
            let uneven = (0..members).map(|rank| (rank * len / 2) % 331 + usize::from(rank == 0)).collect();
            all.push(Call { kind: "REDUCE_SCATTER", pieced: true, root: 0, counts: uneven });
        }
    }
    all
}

/// The file that `kernels/on_cpu/meeting/check.cpp` includes.
fn written() -> String {
    let mut text =
        "// By src/fabric/limits/traffic_tests.rs: kind, through slots, root, elements of each member's slice;\n\
                    // units that each member sends and takes; trips.\n"
            .to_owned();
    calls().iter().for_each(|call| writeln!(text, "{}", call.row()).unwrap());
    text
}

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/on_cpu/meeting/traffic.inc");

#[test]
fn the_kernels_source_is_checked_against_these_counts() {
    assert!(std::fs::read_to_string(FILE).unwrap() == written(), "run `cargo test --lib write_traffic -- --ignored`");
}

#[test]
#[ignore = "writes a file of the repository"]
fn write_traffic() {
    std::fs::write(FILE, written()).unwrap();
}

/// When the kernel of `slots` ends, in trips, if all members do the same at once: what `Trade::run` waits for.
fn simulated(pieces: usize, returns: bool) -> usize {
    let ahead = if returns { 1 } else { 2 };
    let steps = pieces + usize::from(returns);
    // When pieces and sums were sent, and when steps ended.
    let (mut sent, mut sums, mut ended) = (vec![0; ahead.min(pieces)], Vec::new(), Vec::<usize>::new());
    for p in 0..steps {
        let mut now = ended.last().copied().unwrap_or(0);
        let taken = if returns { p } else { p.max(1) - 1 };
        if taken > 0 {
            now = now.max(ended[taken - 1] + 1);
        }
        if p + ahead < pieces {
            sent.push(now);
        }
        if p < pieces {
            now = now.max(sent[p] + 1);
            sums.push(now);
        }
        if returns && p > 0 {
            now = now.max(sums[p - 1] + 1);
        }
        ended.push(now);
    }
    ended[steps - 1] + 1
}

#[test]
fn trips_are_those_of_the_protocol() {
    for pieces in 1..200 {
        for returns in [false, true] {
            assert_eq!(Traffic::through_slots(&[16, 16], 0, pieces, returns).trips, simulated(pieces, returns));
        }
    }
}

/// An all-reduce of so many bytes, in one trip and through slots, as the algorithms cut it.
fn both(bytes: usize, members: usize) -> [usize; 2] {
    let slices: Vec<usize> = (0..members).map(|rank| slice(rank, members, bytes, GRAIN).len()).collect();
    let through = |slices: &[usize], returns| {
        let (largest, slot) = (slices[0], PadLayout::direct(members).inbox_slot);
        let blocks = largest.div_ceil(slot / 2).min(BLOCKS as usize);
        Traffic::through_slots(slices, 0, Tiling::even(largest, blocks, slot).rounds, returns).nanoseconds()
    };
    let slots = if members == 2 { through(&[bytes; 2], false) } else { through(&slices, true) };
    [Traffic::in_one_trip(bytes, members, 0, |_| true).nanoseconds(), slots]
}

#[test]
fn the_limits_of_one_trip_follow() {
    for members in 3..=16 {
        let most = most_in_one_trip(members);
        assert_eq!(inbox::most_whole(members), most, "{members} members");
        // A per cent, since slices are whole grains and units are whole.
        let [at, beyond] = [most / 100 * 99, most / 100 * 101].map(|bytes| both(bytes, members));
        assert!(at[0] <= at[1] && beyond[0] >= beyond[1], "{members} members: {at:?}, {beyond:?}");
    }
    // Between two as many bytes go either way, and one trip has fewer trips: its limit is the room.
    for bytes in [1 << 10, MB, 2 * MB] {
        let [one, slots] = both(bytes, 2);
        assert!(one < slots, "{bytes} bytes");
    }
    assert_eq!(inbox::most_whole(2).min(PadLayout::direct(2).inbox), 2 * MB);
}

/// Nanoseconds of other ways of an all-reduce of floats on eight H200s (`benches/results`: before there were inboxes),
/// by its bytes. In graphs; 8 MB and 32 MB were measured only as calls, which take about 2 us more.
const EIGHT: [(usize, usize); 3] = [(8 * MB, 66_240), (16 * MB, 100_180), (32 * MB, 194_220)];

// Up to the limit slots are faster by a fiftieth and more, beyond it they are not. (Between two and four slots were
// measured, and were slower than the model: 1 MB between four in 13.2 us instead of 8.5.)
#[test]
fn the_limit_of_slots_follows() {
    let most = slots::most(Bulk::Sums, 8);
    for (bytes, theirs) in EIGHT {
        let slots = both(bytes, 8)[1];
        assert_eq!(slots * 51 < theirs * 50, bytes <= most, "{bytes} bytes: {slots}, {theirs} ns");
    }
}
