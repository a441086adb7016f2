//! Machines that were measured with care: `benches/results`.

use super::{BLOCKS, Limits, traffic::most_in_one_trip};

/// Limits for a number of members.
type Row = (usize, Limits);

const KB: usize = 1 << 10;
const MB: usize = 1 << 20;

/// By the name that the driver gives; all devices of a pool have it, and access to each other's memory. `NVIDIA H200`
/// is the one with NVLink to a switch; the PCIe card has another name.
///
/// 2 and 4 of them were measured (`benches/results`). The sizes for 8 keep what one device sends. Only prototypes
/// were measured there: the ring of kernels took 335 us at 64 MB and 1306 at 256 MB, NCCL 364 and 1356. The limits of
/// inboxes between 4 and 8 are those of a model ([`traffic`](super::traffic)).
const TABLE: &[(&str, &[Row])] = &[("NVIDIA H200", &[(2, H200_2), (4, H200_4), (8, H200_8)])];

const H200_2: Limits = Limits {
    ll: 256 * KB,
    ll_blocks: BLOCKS,
    inbox: 2 * MB,
    inbox_whole: 2 * MB,
    inbox_blocks: BLOCKS,
    slots: 8 * MB,
    slots_held: 128 * MB,
    slots_blocks: BLOCKS,
    norm_pull: 2 * MB,
    eager: MB,
    eager_whole: MB,
    eager_per_block: 8 * KB,
    ring: usize::MAX,
    ring_blocks: 64,
    exchange_ce: 64 * MB,
    exchange_ce_parts: 512 * MB,
    exchange: usize::MAX,
    exchange_blocks: BLOCKS,
    ce: 128 * MB,
    overlapped: 8 * MB,
    overlapped_blocks: 16,
    per_block: 16 * KB,
    blocks: 64,
    large: 8 * MB,
    large_blocks: 64,
    relay_blocks: 64,
    allgather: 8 * MB,
    allgather_blocks: 64,
};
const H200_4: Limits = Limits {
    ll: 128 * KB,
    inbox: 2 * MB / 3,
    inbox_whole: most_in_one_trip(4),
    slots_held: usize::MAX,
    norm_pull: 16 * MB,
    eager_whole: MB / 3,
    ring: 32 * MB,
    exchange_ce: usize::MAX,
    exchange_ce_parts: usize::MAX,
    exchange: 8 * MB,
    ce: 128 * MB,
    overlapped: usize::MAX,
    large: 2 * MB,
    large_blocks: 16,
    relay_blocks: 32,
    allgather: 4 * MB,
    allgather_blocks: 96,
    ..H200_2
};
const H200_8: Limits = Limits {
    ll: 768 * KB / 7,
    inbox: 2 * MB / 7,
    inbox_whole: most_in_one_trip(8),
    slots: 16 * MB,
    eager: 2 * MB / 7,
    eager_whole: MB / 7,
    exchange: 16 * MB,
    ce: usize::MAX,
    ..H200_4
};

/// The rows of a device, by members.
pub(crate) fn of(name: &str) -> Option<&'static [Row]> {
    TABLE.iter().find(|(device, _)| *device == name).map(|(_, rows)| *rows)
}

/// Limits for any number of members: between two rows, sizes on the straight line between the two when both axes are
/// logarithmic, and blocks as in the larger row, since fewer are right for more members; and what is only for so many
/// (a ring of kernels, copy engines) as in the larger row, too. Beyond the last row a device does not send more than
/// there.
pub(crate) fn between(rows: &[Row], members: usize) -> Limits {
    let above = rows.iter().position(|&(n, _)| n >= members);
    match above {
        Some(0) => rows[0].1,
        None => {
            let &(n, last) = rows.last().expect("a table has rows");
            let part = |all: usize| all * (n - 1) / (members - 1);
            let [ll, inbox, inbox_whole, eager, eager_whole] =
                [last.ll, last.inbox, last.inbox_whole, last.eager, last.eager_whole].map(part);
            Limits { ll, inbox, inbox_whole, eager, eager_whole, ..last }
        }
        Some(at) => {
            let ((low_n, low), (high_n, high)) = (rows[at - 1], rows[at]);
            let ln = |n: usize| (n as f64).ln();
            let way = (ln(members) - ln(low_n)) / (ln(high_n) - ln(low_n));
            let size = |low: usize, high: usize| match members == high_n {
                true => high,
                false => (ln(low.max(1)) * (1.0 - way) + ln(high.max(1)) * way).exp().round() as usize,
            };
            Limits {
                ll: size(low.ll, high.ll),
                inbox: size(low.inbox, high.inbox),
                inbox_whole: size(low.inbox_whole, high.inbox_whole),
                eager: size(low.eager, high.eager),
                eager_whole: size(low.eager_whole, high.eager_whole),
                eager_per_block: size(low.eager_per_block, high.eager_per_block),
                per_block: size(low.per_block, high.per_block),
                large: size(low.large, high.large),
                ..high
            }
        }
    }
}
