//! `gpu-pool bench`: times collectives, with the options and columns of nccl-tests. `op` has the operations, `number`
//! the element types and the data of the check.
//!
//! In a turn every device thread warms up, meets the others, enqueues the operation back to back, and waits for its
//! stream. The time is the slowest thread's, per operation. The check is a call of its own, on fresh data.

mod number;
mod op;

use clap::ValueEnum;
use gpu_pool::{Device, DeviceBuffer, GpuPool, Result};
use indicatif::{ProgressBar, ProgressStyle};
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
    /// GB/s: what each link carries at least.
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
    out_of_place: Option<Timed>,
    in_place: Option<Timed>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let text = |error: gpu_pool::Error| error.to_string();
    let pool = GpuPool::builder().build().map_err(text)?;
    let (members, devices) = (pool.device_count(), pool.report().devices);
    if arguments.root >= members {
        return Err(format!("root {} of {members} devices", arguments.root));
    }
    if !arguments.json {
        println!("# {members} x {}", devices[0].name);
        println!("{HEAD}");
    }
    let sizes = sizes(arguments);
    // Drawn on stderr, and on a terminal only.
    let bar = ProgressBar::new(sizes.len() as u64).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let mut wrong = 0;
    for size in sizes {
        bar.set_message(format!("{size} bytes"));
        let row = match arguments.dtype {
            Type::Int8 => row::<i8>(&pool, arguments, size),
            Type::Uint8 => row::<u8>(&pool, arguments, size),
            Type::Int32 => row::<i32>(&pool, arguments, size),
            Type::Uint32 => row::<u32>(&pool, arguments, size),
            Type::Int64 => row::<i64>(&pool, arguments, size),
            Type::Uint64 => row::<u64>(&pool, arguments, size),
            Type::Half => row::<half::f16>(&pool, arguments, size),
            Type::Float => row::<f32>(&pool, arguments, size),
            Type::Double => row::<f64>(&pool, arguments, size),
            Type::Bfloat16 => row::<half::bf16>(&pool, arguments, size),
        };
        let row = row.map_err(text)?;
        wrong += [row.out_of_place, row.in_place].into_iter().flatten().filter_map(|timed| timed.wrong).sum::<usize>();
        let line = if arguments.json { serde_json::to_string(&row).map_err(|e| e.to_string())? } else { shown(&row) };
        bar.suspend(|| println!("{line}"));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !arguments.json {
        println!("# {wrong} wrong elements");
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const HEAD: &str = "\
#                                                        out-of-place                       in-place
#       size         count      type  redop   root     time  algbw  busbw #wrong     time  algbw  busbw #wrong
#        (B)    (elements)                             (us) (GB/s) (GB/s)            (us) (GB/s) (GB/s)";

fn shown(row: &Row) -> String {
    let Row { size, count, r#type, redop, root, .. } = row;
    let timed = |timed: Option<Timed>| match timed {
        None => format!("{:>9}{:>7}{:>7}{:>7}", "-", "-", "-", "-"),
        Some(Timed { us, algbw, busbw, wrong }) => {
            let wrong = wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string());
            format!("{us:>9.2}{algbw:>7.2}{busbw:>7.2}{wrong:>7}")
        }
    };
    let (out, within) = (timed(row.out_of_place), timed(row.in_place));
    format!("{size:>12}{count:>14}{:>10}{redop:>7}{root:>7}{out}{within}", r#type)
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

fn row<T: Number>(pool: &GpuPool, arguments: &Arguments, size: usize) -> Result<Row> {
    let &Arguments { op, reduction, root, dtype, .. } = arguments;
    let members = pool.device_count();
    // Equal parts for all.
    let total = size / size_of::<T>() / members * members;
    let case = Case { op, reduction, root, total, members };
    let timed = |in_place: bool| -> Result<Option<Timed>> {
        if !op.places()[usize::from(in_place)] {
            return Ok(None);
        }
        let members = pool.run(|dev, _| measure::<T>(dev, &case, arguments, in_place))?;
        let us = members.iter().map(|(us, _)| *us).fold(0.0, f64::max);
        let size = total * size_of::<T>();
        let algbw = size as f64 / us.max(1e-3) / 1e3;
        let wrong = (arguments.check != 0).then(|| members.iter().map(|(_, wrong)| wrong).sum());
        Ok(Some(Timed { us, algbw, busbw: algbw * op.bus_factor(case.members), wrong }))
    };
    Ok(Row {
        op: name(op),
        size: total * size_of::<T>(),
        count: case.count(),
        r#type: name(dtype),
        redop: if op.reduces() { name(reduction) } else { "none".to_owned() },
        root: if op.has_root() { root as i64 } else { -1 },
        devices: members,
        out_of_place: timed(false)?,
        in_place: timed(true)?,
    })
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Elements that are uploaded or downloaded at once: whole periods, so that all pieces of an upload are equal.
const PIECE: usize = PERIOD * 1024;

/// One member's part: microseconds of a call, and the number of wrong elements.
fn measure<T: Number>(dev: &Device, case: &Case, arguments: &Arguments, in_place: bool) -> Result<(f64, usize)> {
    let [read, written] = case.lengths();
    let larger = read.max(written);
    let mut src = if in_place { None } else { Some(dev.zeros::<T>(read)?) };
    let mut dst = dev.zeros::<T>(if in_place { larger } else { written })?;
    let call = |src: &Option<DeviceBuffer<T>>, dst: &mut DeviceBuffer<T>| match src {
        Some(src) => case.call(dev, src, dst),
        None => case.call_in_place(dev, dst),
    };
    let me = dev.rank();
    let mut wrong = 0;
    if let Some(src) = &mut src {
        fill(dev, src, |at| case.input(me, in_place, at))?;
    }
    if arguments.check != 0 {
        if in_place {
            fill(dev, &mut dst, |at| case.input(me, in_place, at))?;
        }
        call(&src, &mut dst)?;
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
    for _ in 0..arguments.warmup {
        call(&src, &mut dst)?;
    }
    dev.synchronize()?;
    dev.barrier()?;
    let start = Instant::now();
    for _ in 0..arguments.iters {
        call(&src, &mut dst)?;
    }
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
