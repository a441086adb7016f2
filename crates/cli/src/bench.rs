//! `gpu-pool bench`: times collectives, with the options and columns of nccl-tests. `op` has the operations, `number`
//! the element types and the data of the check, `nccl` the same operations by NCCL.
//!
//! In a turn every device thread warms up, meets the others, enqueues the operation back to back, and waits for its
//! stream. The time is the slowest thread's, per operation. The check is a call of its own, on fresh data. Where NCCL
//! is found both take turns, and the median turn of each counts.

mod nccl;
mod number;
mod op;

use clap::ValueEnum;
use gpu_pool::{Device, DeviceBuffer, GpuPool, PerDevice, Result};
use indicatif::{ProgressBar, ProgressStyle};
use nccl::Peer;
use number::{Number, PERIOD, Reduction, Type};
use op::{Case, Op};
use serde::Serialize;
use std::{process::ExitCode, time::Instant};

/// Times a collective on all devices, and checks its results, with the options and columns of nccl-tests.
///
/// The exit code is 1 if a result is wrong.
#[derive(clap::Args)]
pub struct Arguments {
    /// The operation.
    #[arg(value_enum)]
    op: Op,
    /// The smallest size, in bytes: 8, 1K, 64M, 1G.
    #[arg(short = 'b', long = "minbytes", default_value = "1K", value_parser = bytes)]
    least: usize,
    /// The largest size.
    #[arg(short = 'e', long = "maxbytes", default_value = "4M", value_parser = bytes)]
    most: usize,
    /// Each size is so many times the last one.
    #[arg(short = 'f', long = "stepfactor", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
    /// Each size is so many bytes more than the last one, in place of the factor.
    #[arg(short = 'i', long = "stepbytes", value_parser = bytes)]
    step: Option<usize>,
    /// How elements are combined.
    #[arg(short = 'o', long = "op", value_enum, default_value_t = Reduction::Sum)]
    reduction: Reduction,
    /// The type of elements.
    #[arg(short = 'd', long = "datatype", value_enum, default_value_t = Type::Float)]
    dtype: Type,
    /// The root of a broadcast or of a reduce.
    #[arg(short = 'r', long, default_value_t = 0)]
    root: usize,
    /// Calls that are timed together.
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Calls before these.
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 5)]
    warmup: u32,
    /// 1: checks the results; 0: does not.
    #[arg(short = 'c', long, default_value_t = 1)]
    check: u32,
    /// Writes JSON lines.
    #[arg(long)]
    json: bool,
}

/// Out of place or in place: nccl-tests' columns.
#[derive(Clone, Copy, Debug, Serialize)]
struct Timed {
    us: f64,
    /// GB/s: bytes by time.
    algbw: f64,
    /// GB/s: the least traffic of each link.
    busbw: f64,
    /// Elements, of all members. None if nothing was checked.
    wrong: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Row {
    op: String,
    size: usize,
    count: usize,
    r#type: String,
    redop: String,
    root: i64,
    devices: usize,
    #[serde(flatten)]
    own: Places,
    #[serde(skip_serializing_if = "Option::is_none")]
    nccl: Option<Places>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Places {
    out_of_place: Option<Timed>,
    in_place: Option<Timed>,
}

impl Places {
    fn both(self) -> [Option<Timed>; 2] {
        [self.out_of_place, self.in_place]
    }
}

/// Turns of each side, where NCCL is the other one.
const TURNS: usize = 5;

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let text = |error: gpu_pool::Error| error.to_string();
    let sizes = sizes(arguments);
    if sizes.is_empty() {
        return Err(format!("no size: -b {} is larger than -e {}", arguments.least, arguments.most));
    }
    let pool = GpuPool::builder().build().map_err(text)?;
    let (members, devices) = (pool.device_count(), pool.report().devices);
    if arguments.root >= members {
        return Err(format!("root {} of {members} devices", arguments.root));
    }
    let nccl = nccl::join(&pool);
    if !arguments.json {
        println!("# {members} x {}", devices[0].name);
        match &nccl {
            Ok((_, version)) => println!("# medians of {TURNS} turns, NCCL {version}; ratio: NCCL's time by ours"),
            Err(why) => println!("# without NCCL: {why}"),
        }
        println!("{}", head(nccl.is_ok()));
    }
    let peers = nccl.as_ref().ok().map(|(peers, _)| peers);
    // Drawn on stderr, and on a terminal only.
    let bar = ProgressBar::new(sizes.len() as u64).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut wrong = 0;
    for size in sizes {
        bar.set_message(format!("{size} bytes"));
        let row = match arguments.dtype {
            Type::Int8 => row::<i8>(&pool, peers, arguments, size),
            Type::Uint8 => row::<u8>(&pool, peers, arguments, size),
            Type::Int32 => row::<i32>(&pool, peers, arguments, size),
            Type::Uint32 => row::<u32>(&pool, peers, arguments, size),
            Type::Int64 => row::<i64>(&pool, peers, arguments, size),
            Type::Uint64 => row::<u64>(&pool, peers, arguments, size),
            Type::Half => row::<half::f16>(&pool, peers, arguments, size),
            Type::Float => row::<f32>(&pool, peers, arguments, size),
            Type::Double => row::<f64>(&pool, peers, arguments, size),
            Type::Bfloat16 => row::<half::bf16>(&pool, peers, arguments, size),
        };
        let row = row.map_err(text)?;
        let all = [Some(row.own), row.nccl].into_iter().flatten().flat_map(Places::both);
        wrong += all.flatten().filter_map(|timed| timed.wrong).sum::<usize>();
        let line = if arguments.json { serde_json::to_string(&row).map_err(|e| e.to_string())? } else { shown(&row) };
        bar.suspend(|| println!("{line}"));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !arguments.json {
        let checked = format!("# {wrong} wrong elements");
        println!("{}", if arguments.check == 0 { "# not checked" } else { &checked });
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const HEAD: &str = "\
#                                                        out-of-place                       in-place
#       size         count      type  redop   root     time  algbw  busbw #wrong     time  algbw  busbw #wrong
#        (B)    (elements)                             (us) (GB/s) (GB/s)            (us) (GB/s) (GB/s)";

/// As [`HEAD`], for a place of NCCL's.
const NCCL: [&str; 3] =
    ["                NCCL ", "     time  algbw  busbw #wrong  ratio", "     (us) (GB/s) (GB/s)              "];

fn head(nccl: bool) -> String {
    let own = |at: usize| HEAD.lines().nth(at).unwrap_or_default();
    let [first, second, third] = NCCL;
    let places = format!("{first}{:<16}{first}{:<16}", "out-of-place", "in-place");
    let theirs = if nccl { [places, second.repeat(2), third.repeat(2)] } else { Default::default() };
    let lines = theirs.iter().enumerate().map(|(at, theirs)| format!("{:<110}{theirs}", own(at)).trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

fn shown(row: &Row) -> String {
    let Row { size, count, r#type, redop, root, own, nccl, .. } = row;
    let timed = |timed: Option<Timed>| match timed {
        None => format!("{:>9}{:>7}{:>7}{:>7}", "-", "-", "-", "-"),
        Some(Timed { us, algbw, busbw, wrong }) => {
            let wrong = wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
            format!("{us:>9.2}{algbw:>7.2}{busbw:>7.2}{wrong:>7}")
        }
    };
    let mut line = format!("{size:>12}{count:>14}{:>10}{redop:>7}{root:>7}", r#type);
    own.both().into_iter().for_each(|place| line += &timed(place));
    for (own, nccl) in own.both().into_iter().zip(nccl.iter().flat_map(|nccl| nccl.both())) {
        let ratio = own.zip(nccl).map_or("-".to_owned(), |(own, nccl)| format!("{:.2}", nccl.us / own.us));
        line += &format!("{}{ratio:>7}", timed(nccl));
    }
    line
}

fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err("a number of bytes such as 8, 1K, 64M or 1G is expected".to_owned()),
    };
    let number: usize = digits.parse().map_err(|_| "a number of bytes is expected".to_owned())?;
    number.checked_mul(1 << unit).ok_or_else(|| "too many bytes".to_owned())
}

fn sizes(arguments: &Arguments) -> Vec<usize> {
    let next = |size: &usize| match arguments.step {
        Some(step) => size.checked_add(step.max(1)),
        None => size.max(&1).checked_mul(arguments.factor as usize),
    };
    std::iter::successors(Some(arguments.least), next).take_while(|size| *size <= arguments.most).collect()
}

fn row<T: Number>(pool: &GpuPool, peers: Option<&PerDevice<Peer>>, arguments: &Arguments, size: usize) -> Result<Row> {
    let &Arguments { op, reduction, root, dtype, .. } = arguments;
    let members = pool.device_count();
    // Equal parts for all.
    let total = size / size_of::<T>() / members * members;
    let case = Case { op, reduction, root, total, members };
    let size = total * size_of::<T>();
    let turn = |in_place: bool, nccl: bool, check: bool| -> Result<(f64, usize)> {
        let members = pool.run(|dev, _| {
            let peer = peers.filter(|_| nccl).map(|peers| peers.borrow(dev)).transpose()?;
            measure::<T>(dev, &case, arguments, (in_place, check), peer.as_deref())
        })?;
        Ok((members.iter().map(|(us, _)| *us).fold(0.0, f64::max), members.iter().map(|(_, wrong)| wrong).sum()))
    };
    // NCCL rounds the factor of such an average to 16 bits.
    let checks = |nccl| arguments.check != 0 && !(nccl && reduction == Reduction::Avg && dtype.is_half());
    let place = |in_place: bool| -> Result<[Option<Timed>; 2]> {
        if !op.places()[usize::from(in_place)] {
            return Ok([None; 2]);
        }
        let sides = if peers.is_some() { &[false, true][..] } else { &[false][..] };
        let (mut turns, mut wrong) = ([vec![], vec![]], [0; 2]);
        for number in 0..if peers.is_some() { TURNS } else { 1 } {
            for &nccl in sides {
                let (us, differ) = turn(in_place, nccl, number == 0 && checks(nccl))?;
                turns[usize::from(nccl)].push(us);
                wrong[usize::from(nccl)] += differ;
            }
        }
        let timed = |nccl: bool| {
            let mut turns = turns[usize::from(nccl)].clone();
            turns.sort_by(f64::total_cmp);
            let us = *turns.get(turns.len() / 2)?;
            let algbw = size as f64 / us.max(1e-3) / 1e3;
            let wrong = checks(nccl).then_some(wrong[usize::from(nccl)]);
            Some(Timed { us, algbw, busbw: algbw * op.bus_factor(case.members), wrong })
        };
        Ok([timed(false), timed(true)])
    };
    let [[own_out, nccl_out], [own_in, nccl_in]] = [place(false)?, place(true)?];
    Ok(Row {
        op: name(op),
        size,
        count: case.count(),
        r#type: name(dtype),
        redop: if op.reduces() { name(reduction) } else { "none".to_owned() },
        root: if op.has_root() { root as i64 } else { -1 },
        devices: members,
        own: Places { out_of_place: own_out, in_place: own_in },
        nccl: peers.map(|_| Places { out_of_place: nccl_out, in_place: nccl_in }),
    })
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Elements that are uploaded or downloaded at once: whole periods, so that all pieces of an upload are equal.
const PIECE: usize = PERIOD * 1024;

/// One member's part: microseconds of a call, and the number of wrong elements. By NCCL, if a peer is there.
fn measure<T: Number>(
    dev: &Device,
    case: &Case,
    arguments: &Arguments,
    (in_place, check): (bool, bool),
    peer: Option<&Peer>,
) -> Result<(f64, usize)> {
    let [read, written] = case.lengths();
    let larger = read.max(written);
    let mut src = if in_place { None } else { Some(dev.zeros::<T>(read)?) };
    let mut dst = dev.zeros::<T>(if in_place { larger } else { written })?;
    let calls = |src: &Option<DeviceBuffer<T>>, dst: &mut DeviceBuffer<T>, calls: u32| match (peer, src) {
        (Some(peer), src) => nccl::submit((peer, dev), case, src.as_ref(), dst, calls),
        (None, Some(src)) => (0..calls).try_for_each(|_| case.call(dev, src, dst)),
        (None, None) => (0..calls).try_for_each(|_| case.call_in_place(dev, dst)),
    };
    // The gate of launches does not know of NCCL: no member allocates while another one's kernel waits for it.
    let meet = || {
        dev.synchronize()?;
        dev.barrier()
    };
    let me = dev.rank();
    let mut wrong = 0;
    if let Some(src) = &mut src {
        fill(dev, src, |at| case.input(me, in_place, at))?;
    }
    if check {
        if in_place {
            fill(dev, &mut dst, |at| case.input(me, in_place, at))?;
        }
        meet()?;
        calls(&src, &mut dst, 1)?;
        dev.synchronize()?;
        let reduced = case.reduced();
        for from in (0..dst.len()).step_by(PIECE) {
            let to = dst.len().min(from + PIECE);
            let found = dev.download(&dst.slice(from..to))?;
            let differs = |at: usize| {
                let wanted = case.expected(&reduced, me, in_place, from + at);
                wanted.is_some_and(|wanted: T| found[at] != wanted)
            };
            wrong += (0..found.len()).filter(|&at| differs(at)).count();
        }
    }
    meet()?;
    calls(&src, &mut dst, arguments.warmup)?;
    meet()?;
    let start = Instant::now();
    calls(&src, &mut dst, arguments.iters)?;
    dev.synchronize()?;
    Ok((start.elapsed().as_secs_f64() * 1e6 / f64::from(arguments.iters), wrong))
}

fn fill<T: Number>(dev: &Device, buffer: &mut DeviceBuffer<T>, number: impl Fn(usize) -> T) -> Result<()> {
    for from in (0..buffer.len()).step_by(PIECE) {
        let to = buffer.len().min(from + PIECE);
        let piece: Vec<T> = (from..to).map(&number).collect();
        dev.upload_into(&piece, &mut buffer.slice_mut(from..to))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "../tests/unit/bench_tests.rs"]
mod tests;
