//! The host kernels against arithmetic that is written another way, and the arguments against the compiled kernels.

use super::*;
use crate::{
    collective::algorithm::{
        eager,
        exchange::{self, Trade},
        inbox,
        ll::{self, Push},
        ring::{self, Neighbours, Round},
        shm::{self, Moves, Role, Stage, Staged},
        slots::{self, Parcels},
    },
    driver::{HostArg, LaunchDims},
    fabric::layout::{
        BLOCKS, FEW, INBOX_SLOTS, LL_BYTES, LL_BYTES_THROUGH_HOST, MOST, PadLayout, Route, STAGED_BLOCKS, eager_bytes,
        reported, set_epochs,
    },
};
use half::{bf16, f16};
use proptest::prelude::*;

const OPS: [ReduceOp; 6] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg, ReduceOp::Scaled(1.0)];
const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
];

/// One element's fold, the plain way.
trait Naive: bytemuck::Pod + std::fmt::Debug {
    const DTYPE: DType;
    fn fold(op: ReduceOp, x: &[Self], factors: &[f64]) -> Self;
    fn is_nan(self) -> bool;
}

macro_rules! integers {
    ($($T:ty, $D:ident;)+) => {$(
        /// Exact, in 128 bits that wrap where the type's own would have.
        impl Naive for $T {
            const DTYPE: DType = DType::$D;

            fn fold(op: ReduceOp, x: &[Self], factors: &[f64]) -> Self {
                let x = x.iter().map(|&x| i128::from(x));
                match op {
                    ReduceOp::Sum => x.sum::<i128>() as $T,
                    ReduceOp::Prod => x.fold(1, |a: i128, x| i128::from(a.wrapping_mul(x) as $T)) as $T,
                    ReduceOp::Min => x.min().unwrap() as $T,
                    ReduceOp::Max => x.max().unwrap() as $T,
                    ReduceOp::Avg => (i128::from(x.clone().sum::<i128>() as $T) / x.len() as i128) as $T,
                    ReduceOp::Scaled(_) => {
                        let (least, most) = (<$T>::MIN as f64, <$T>::MAX as f64);
                        x.zip(factors).fold(0, |a: i128, (x, f)| {
                            let whole = (f.trunc().clamp(least, most) as i128).min(i128::from(<$T>::MAX));
                            let f = if f.is_nan() { 0 } else { whole };
                            i128::from(a.wrapping_add(x.wrapping_mul(f)) as $T)
                        }) as $T
                    }
                }
            }
            fn is_nan(self) -> bool {
                false
            }
        }
    )+};
}
integers! { i8, I8; u8, U8; i32, I32; u32, U32; i64, I64; u64, U64; }

macro_rules! floats {
    ($($T:ty, $D:ident, $Acc:ty, $wide:expr, $narrow:expr;)+) => {$(
        impl Naive for $T {
            const DTYPE: DType = DType::$D;

            fn fold(op: ReduceOp, x: &[Self], factors: &[f64]) -> Self {
                let count = x.len() as $Acc;
                let factor = |k: usize| if let ReduceOp::Scaled(_) = op { factors[k] as $Acc } else { 1.0 };
                let x: Vec<$Acc> = x.iter().enumerate().map(|(k, &x)| $wide(x) * factor(k)).collect();
                let nan = x.iter().any(|x| x.is_nan());
                // The first of equal ones, so that zeros keep their sign.
                let best = |better: fn(&$Acc, &$Acc) -> bool| {
                    x.iter().copied().find(|a| x.iter().all(|b| !better(b, a))).unwrap_or(<$Acc>::NAN)
                };
                $narrow(match op {
                    ReduceOp::Sum | ReduceOp::Scaled(_) => x.iter().copied().reduce(|a, b| a + b).unwrap(),
                    ReduceOp::Avg => x.iter().copied().reduce(|a, b| a + b).unwrap() * (1.0 / count),
                    ReduceOp::Prod => x.iter().copied().reduce(|a, b| a * b).unwrap(),
                    _ if nan => <$Acc>::NAN,
                    ReduceOp::Min => best(|b, a| b < a),
                    ReduceOp::Max => best(|b, a| b > a),
                })
            }
            fn is_nan(self) -> bool {
                <$T>::is_nan(self)
            }
        }
    )+};
}
floats! {
    f32, F32, f32, |x| x, |x| x;
    f64, F64, f64, |x| x, |x| x;
    f16, F16, f32, f16::to_f32, f16::from_f32;
    bf16, BF16, f32, bf16::to_f32, bf16::from_f32;
}

fn part<T>(x: &mut [T]) -> Part {
    Part { address: x.as_mut_ptr().expose_provenance() as u64, bytes: size_of_val(x) }
}

/// What the driver of a software GPU does with a launch.
fn launch(entry: Entry, args: &[KernelArg]) {
    let argument = |arg: &KernelArg| match *arg {
        KernelArg::Value(value) => HostArg::Value(value),
        KernelArg::Slice { address, bytes, write } => {
            HostArg::Slice { ptr: std::ptr::with_exposed_provenance_mut(address as usize), bytes, write }
        }
    };
    let args: Vec<HostArg> = args.iter().map(argument).collect();
    // SAFETY: the arguments are those of the entry; the tests own the memory behind them.
    unsafe { entry.host.unwrap()(LaunchDims::cover(1), &args) }
}

/// Combines `sources`; the result is in `outside` further buffers and, with `inside`, in all of the sources.
fn combined<T: Naive>(
    op: ReduceOp,
    factors: &[f64],
    mut sources: Vec<Vec<T>>,
    outside: usize,
    inside: bool,
) -> Vec<Vec<T>> {
    let n = sources[0].len();
    let mut others = vec![vec![T::zeroed(); n]; outside];
    let from: Vec<Part> = sources.iter_mut().map(|x| part(x)).collect();
    let mut to: Vec<Part> = others.iter_mut().map(|x| part(x)).collect();
    if inside {
        to.extend_from_slice(&from);
    }
    let factors = if let ReduceOp::Scaled(_) = op { factors } else { &[] };
    let call = Combine { n, op, factors, sources: &from, destinations: &to, meet: DeviceBarrier::NONE };
    launch(combine(T::DTYPE), &call.args(true));
    if inside {
        others.extend(sources);
    }
    others
}

#[track_caller]
fn same<T: Naive>(got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let equal = bytemuck::bytes_of(got) == bytemuck::bytes_of(want) || (got.is_nan() && want.is_nan());
        assert!(equal, "element {i}: {got:?} for {want:?}");
    }
}

/// One operation on sources of random bits, so with NaNs, infinities and subnormals.
fn agrees<T: Naive>(op: ReduceOp, ranks: usize, n: usize, bits: &[u64], factors: &[f64], inside: bool) {
    let element = |k: usize, i: usize| {
        let mut word = bits[(k * 31 + i * 7) % bits.len()].rotate_left((k * 13 + i) as u32);
        if (k + i).is_multiple_of(3) {
            // Small numbers as well: nearly all random bits are huge or tiny.
            word = u64::from(bytemuck::cast::<f32, u32>((i as f32) - 3.5 * k as f32)) << 32 | (word & 0xff);
        }
        bytemuck::pod_read_unaligned(&word.to_ne_bytes()[8 - size_of::<T>()..])
    };
    let sources: Vec<Vec<T>> = (0..ranks).map(|k| (0..n).map(|i| element(k, i)).collect()).collect();
    let column = |i: usize| sources.iter().map(|x| x[i]).collect::<Vec<T>>();
    let want: Vec<T> = (0..n).map(|i| T::fold(op, &column(i), factors)).collect();
    let got = combined(op, factors, sources.clone(), 2, inside);
    assert_eq!(got.len(), 2 + if inside { ranks } else { 0 });
    got.iter().for_each(|got| same(got, &want));
}

fn agrees_by_type(dtype: DType, op: ReduceOp, ranks: usize, n: usize, bits: &[u64], factors: &[f64], inside: bool) {
    let agrees = match dtype {
        DType::F32 => agrees::<f32>,
        DType::F64 => agrees::<f64>,
        DType::F16 => agrees::<f16>,
        DType::BF16 => agrees::<bf16>,
        DType::I8 => agrees::<i8>,
        DType::U8 => agrees::<u8>,
        DType::I32 => agrees::<i32>,
        DType::U32 => agrees::<u32>,
        DType::I64 => agrees::<i64>,
        DType::U64 => agrees::<u64>,
    };
    agrees(op, ranks, n, bits, factors, inside);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The bits depend on the values and the order of ranks alone: not on the size
    /// (https://github.com/sgl-project/sglang/issues/34159), the number of destinations, or whether they are the
    /// sources.
    #[test]
    fn host_kernels_agree_with_the_naive_fold(
        ranks in 1_usize..=20,
        n in prop_oneof![0_usize..40, 1020_usize..1030],
        bits in prop::collection::vec(any::<u64>(), 64),
        factors in prop::collection::vec(prop_oneof![-4.0..4.0, -1e20..1e20, Just(f64::NAN)], 20),
        inside: bool,
    ) {
        for dtype in DTYPES {
            for op in OPS {
                agrees_by_type(dtype, op, ranks, n, &bits, &factors, inside);
            }
        }
    }
}

#[test]
fn a_nan_stays_and_the_lower_ranks_zero_does() {
    fn one<T: Naive>(op: ReduceOp, x: &[T]) -> T {
        combined(op, &[], x.iter().map(|&x| vec![x]).collect(), 1, false)[0][0]
    }
    for x in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
        assert!(OPS[..5].iter().all(|&op| one(op, &x).is_nan()));
        assert!(OPS[..5].iter().all(|&op| one(op, &x.map(f16::from_f32)).is_nan()));
    }
    for op in [ReduceOp::Min, ReduceOp::Max] {
        assert!(one(op, &[-0.0_f32, 0.0]).is_sign_negative() && one(op, &[0.0_f64, -0.0]).is_sign_positive());
    }
    // Nothing starts from +0.0.
    assert!(one(ReduceOp::Sum, &[-0.0_f32, -0.0]).is_sign_negative());
    assert!(one(ReduceOp::Avg, &[bf16::NEG_ZERO; 3]).is_sign_negative());
}

#[test]
fn integers_wrap_and_their_averages_are_truncated() {
    fn one<T: Naive>(op: ReduceOp, x: &[T]) -> T {
        combined(op, &[2.9, -1.0, 1e9, f64::NAN], x.iter().map(|&x| vec![x]).collect(), 1, false)[0][0]
    }
    assert_eq!(one(ReduceOp::Sum, &[i8::MAX, 1]), i8::MIN);
    assert_eq!(one(ReduceOp::Prod, &[u32::MAX, u32::MAX]), 1);
    assert_eq!(one(ReduceOp::Avg, &[-1_i32, -2, -2]), -1);
    assert_eq!(one(ReduceOp::Avg, &[255_u8, 2]), 0, "the sum has wrapped before");
    assert_eq!(one(ReduceOp::Avg, &[1_i8; 200]), 0, "200 ranks are more than an i8 counts");
    let scaled = ReduceOp::Scaled(0.0);
    assert_eq!(one(scaled, &[3_i64, 5, 1, 7]), 2 * 3 - 5 + 1_000_000_000, "factors are truncated, NaN is 0");
    assert_eq!(one(scaled, &[3_u8, 5, 1]), 6_u8.wrapping_add(255), "and saturate");
}

/// Half types do not round in between: 2048 + 1 + 1 + ... would stay 2048.
#[test]
fn half_types_round_once() {
    let mut x = vec![vec![f16::from_f32(2048.0)]];
    x.resize(9, vec![f16::ONE]);
    assert_eq!(combined(ReduceOp::Sum, &[], x, 1, false)[0][0].to_f32(), 2056.0);
}

/// A copy is one of bits, a signalling NaN's too; and what is scaled by its factor is not a copy.
#[test]
fn one_source_is_copied_unless_it_is_scaled() {
    let x = vec![f32::from_bits(0x7f80_0001), 1.5, -0.0];
    for op in &OPS[..5] {
        for copy in combined(*op, &[], vec![x.clone()], 3, true) {
            assert_eq!(copy.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), [0x7f80_0001, 0x3fc0_0000, 0x8000_0000]);
        }
    }
    assert_eq!(combined(OPS[5], &[2.0], vec![vec![1.5_f32]], 1, true), [[3.0], [3.0]]);
}

#[test]
fn pairs_are_copied_each_for_itself() {
    let mut from: Vec<Vec<u8>> = (0..20_u8).map(|k| (0..k).map(|i| k ^ i).collect()).collect();
    let mut to: Vec<Vec<u8>> = from.iter().map(|x| vec![0xee; x.len()]).collect();
    let mut all: Vec<(Part, Part)> = from.iter_mut().zip(&mut to).map(|(from, to)| (part(from), part(to))).collect();
    all[7].1 = all[7].0;
    launch(pairs(), &Pairs { pairs: &all, blocks_per_pair: 2, meet: DeviceBarrier::NONE }.args(true));
    from[7] = (0..7).map(|i| 7 ^ i).collect();
    to[7].clone_from(&from[7]);
    assert_eq!(to, from);
}

#[test]
fn members_are_packed_in_rank_order() {
    assert_eq!(DeviceBarrier::members([5, 0, 15]), 0xf05);
    assert_eq!(DeviceBarrier::members(0..16), 0xfedc_ba98_7654_3210);
    assert_eq!((reported(0x38b), reported(0x300)), (Some((3, 11)), None));
}

#[test]
fn signals_lie_where_the_kernels_look_for_them() {
    let header = include_str!("../../../../kernels/meet.cuh");
    for (name, number) in [("MOST", MOST as u32), ("BLOCKS", BLOCKS), ("FEW", FEW), ("STAGED", STAGED_BLOCKS as u32)] {
        assert!(header.contains(&format!("const u32 {name} = {number};")), "{name} is not {number} in meet.cuh");
    }
    let exchange = include_str!("../../../../kernels/exchange.cu");
    assert!(exchange.contains(&format!("const u32 SLOTS = {};", exchange::EXCHANGE_SLOTS)));
    let inbox = include_str!("../../../../kernels/inbox.cuh");
    assert!(inbox.contains(&format!("const u32 SLOTS = {INBOX_SLOTS};")) && inbox.contains("const u32 EMPTY = ~0u;"));
    // `static_assert`ed in kernels/meet.cuh by the same sum.
    let layout = PadLayout::direct(2);
    assert_eq!(layout, PadLayout { packets: 32768, slot: 1 << 20, inbox: 2 << 20, inbox_slot: 32 << 10 });
    let before = 2 * 32768 * 16 + 2 * (1 << 20);
    assert_eq!(layout.bytes(2), 256 + 16384 + 49152 + before + 2 * (2 << 20) + 128 * 4 * (32 << 10));
    let header = layout.header(&[10, 20], 30, 40);
    assert_eq!((header.len() * 8, &header[..3], &header[16..18]), (256, &[10, 20, 0][..], &[30, 40][..]));
    // A `u32` at byte 212, and six behind it.
    assert_eq!((&header[18..26], &header[30..]), (&[0; 8][..], &[0; 2][..]));
    assert_eq!(header[208 / 8..224 / 8], [32768 << 32, (2 * 32768 * 16) << 32 | 1 << 20]);
    let (room, slot) = (2 << 20, 32 << 10);
    assert_eq!(header[224 / 8..240 / 8], [room << 32 | before as u64, slot << 32 | (before as u64 + 2 * room)]);
    let mut later = header.clone();
    set_epochs(&mut later, 7);
    // `epoch[16]` at byte 144, and nothing else.
    assert_eq!((&later[..18], &later[18..26], &later[26..]), (&header[..18], &[7 << 32 | 7; 8][..], &header[26..]));
    for devices in 2..=MOST {
        let (direct, through_host) = (PadLayout::direct(devices), PadLayout::through_host(devices));
        for (layout, bytes) in [(direct, LL_BYTES), (through_host, LL_BYTES_THROUGH_HOST)] {
            let sent = (devices - 1) * layout.packets * 8;
            assert!(layout.packets > 0 && sent <= bytes, "{devices} devices");
            let inbox = layout.inbox(devices);
            assert!(inbox.start <= 8 << 20 && inbox.bytes() <= 21 << 20, "{devices} devices");
            assert!(inbox.start % 128 == 0 && inbox.start + inbox.bytes() == layout.bytes(devices));
            // Blocks write packs of 16 bytes there, and stages begin behind it.
            assert!(layout.bytes(devices) % 128 == 0 && layout.slots(devices) % 128 == 0 && layout.slot % 128 == 0);
        }
        assert!(direct.slot > 0 && direct.slot <= eager_bytes(devices) && through_host.slot == 0);
        assert!(direct.inbox >= 128 << 10 && direct.inbox_slot >= 2048 && through_host.inbox(devices).bytes() == 0);
        // Offsets in it are of 32 bits.
        assert!(direct.bytes(devices) < 1 << 32);
    }
}

fn sizes(args: &[KernelArg]) -> Vec<usize> {
    let size = |arg: &KernelArg| match arg {
        KernelArg::Slice { .. } => 8,
        KernelArg::Value(value) => value.as_bytes().len(),
    };
    args.iter().map(size).collect()
}

/// cuLaunchKernel takes arguments by address and does not know their sizes: a wrong one is garbage in the kernel.
#[test]
fn arguments_fit_the_compiled_kernels() {
    let one = Part { address: 256, bytes: 8 };
    let parts = [one; 3];
    for dtype in DTYPES {
        let (meet, factors) = (DeviceBarrier { signals: 256, ..DeviceBarrier::NONE }, &[1.0; 3][..]);
        let op = ReduceOp::Scaled(1.0);
        let call = Combine { n: 1, op, factors, sources: &parts, destinations: &parts[..2], meet };
        let entry = combine(dtype);
        assert_eq!(sizes(&call.args(false)), entry.module.parameters(entry.name), "{}", entry.name);
        let route = Route { senders: 1, receivers: 1, folds: 1, out: 0, into: 0 };
        let pushed = sizes(&Push { n: 1, op, route, factors, source: one, destination: one, meet }.args());
        for entry in [ll::entry(dtype), eager::entry(dtype)] {
            assert_eq!(pushed, entry.module.parameters(entry.name), "{}", entry.name);
        }
        let stage = Stage { chunk: 128, slot: 128, steps: 1, lanes: 1, ..bytemuck::Zeroable::zeroed() };
        let (role, puts, pulls) = (Role::default(), Moves::default(), Moves::default());
        let call = Staged { meet, stage, role, op, factors, puts, pulls };
        let entry = shm::entry(dtype);
        assert_eq!(sizes(&call.args()), entry.module.parameters(entry.name), "{}", entry.name);
        let pieces = Pieces { piece: 128, count: 1, returns: 1 };
        let call = Trade { op, factors, exchange: exchange::Addresses::default(), pieces, meet };
        let entry = exchange::entry(dtype);
        assert_eq!(sizes(&call.args()), entry.module.parameters(entry.name), "{}", entry.name);
        let (Some(whole), Some(pieced)) = (inbox::entry(dtype), slots::entry(dtype)) else { continue };
        assert_eq!(pushed, whole.module.parameters(whole.name), "{}", whole.name);
        let call = Parcels { from: [0; MOST], bytes: [0; MOST], to: [0; MOST], op, factors, pieces, meet };
        assert_eq!(sizes(&call.args()), pieced.module.parameters(pieced.name), "{}", pieced.name);
    }
    for dtype in [DType::F32, DType::F64] {
        let cut = ring::Cut { rounds: 1, abreast: 1, slots: 2, ..ring::Cut::default() };
        let call = Round {
            meet: DeviceBarrier { signals: 256, ..DeviceBarrier::NONE },
            ring: Neighbours::default(),
            cut,
            dtype,
            factor: 1.0,
        };
        let entry = ring::entry(dtype);
        assert_eq!(sizes(&call.args()), entry.module.parameters(entry.name), "{}", entry.name);
    }
    let call = Pairs { pairs: &[(one, one)], blocks_per_pair: 1, meet: DeviceBarrier::NONE };
    assert_eq!(sizes(&call.args(false)), pairs().module.parameters(pairs().name));
}

/// What must not be in them: local memory, where spilled or indexed arrays go, and loads that may be stale.
#[test]
fn compiled_kernels_keep_to_registers() {
    let float = |dtype| inbox::entry(dtype).expect("for floats");
    let entries =
        [combine, ll::entry, eager::entry, shm::entry, ring::entry, exchange::entry, float].map(|of| of(DType::F32));
    for entry in entries {
        let ptx = entry.module.ptx_text();
        assert!(!ptx.contains(".local") && !ptx.contains("ld.global.nc") && ptx.contains("ld.relaxed.sys"));
    }
}

/// Through the driver of two software GPUs, each with its half of an all-reduce in place: sources and destinations are
/// its own memory and a peer's, each named once.
#[test]
fn software_gpus_run_the_host_kernel() {
    const N: usize = 5000;
    let pool = crate::GpuPool::builder().host(2).build().unwrap();
    let sums = pool.run(|dev, shard| {
        let x = dev.upload(&vec![1.0_f32 + shard.index() as f32; N])?;
        dev.synchronize()?;
        let all = dev.exchange(x.address())?;
        let mine = crate::shard::balanced(dev.rank(), 2, N);
        let half = |address: &Address| Part { address: address + 4 * mine.start as u64, bytes: 4 * mine.len() };
        let parts: Vec<Part> = all.iter().map(half).collect();
        let (dtype, op) = (DType::F32, ReduceOp::Avg);
        let call = Combine {
            n: mine.len(),
            op,
            factors: &[],
            sources: &parts,
            destinations: &parts,
            meet: DeviceBarrier::NONE,
        };
        let (entry, worker) = (combine(dtype), &dev.worker);
        let launch = crate::driver::Launch {
            name: entry.name,
            function: worker.function(entry.module, entry.name)?,
            host: entry.host,
            dims: LaunchDims::cover(1),
            args: &call.args(true),
            early: false,
        };
        // SAFETY: both buffers live until the barrier after the wait, and the halves are the devices' own in between.
        worker.handle.check("test", unsafe { worker.handle.driver.launch(&launch, dev.stream.raw) })?;
        dev.stream.submit();
        dev.synchronize()?;
        dev.barrier()?;
        dev.download(&x)
    });
    assert_eq!(sums.unwrap(), [[1.5; N]; 2]);
}
