//! NCCL with a process for each GPU, as most programs run it. The processes are this program again.
//!
//! All of them get each order at once. Each warms up by collectives, which bring them together, and measures its own
//! calls; the slowest one counts. NCCL may register the buffers of graphs here, since each process has one GPU.

use std::{env, process::Command};

use gpu_pool::GpuPool;
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use half::bf16;
use parking_lot::Mutex;

use crate::{
    graph,
    nccl::{Club, Nccl, UniqueId},
    ops::{Number, Op},
    stage::{Stage, Who},
    support::child::{Process, serve},
    sweep::WARM_UP,
};

/// The variable that makes a process a child: `<rank> <ranks> <bytes of a window> <id of the communicator>`.
const CHILD: &str = "GPU_POOL_BENCH_NCCL";
/// The question whether there are windows.
const WINDOWS: &str = "windows";

/// A turn of the processes.
pub struct Order {
    pub op: Op,
    pub dtype: &'static str,
    pub bytes: usize,
    /// `Plain` or `Windows`.
    pub who: Who,
    /// Whether the calls are in a graph.
    pub graph: bool,
}

/// The processes of a communicator. They do not outlive it.
pub struct Processes {
    children: Mutex<Vec<Process>>,
    /// Whether all of them have windows.
    pub windows: bool,
}

impl Processes {
    /// Starts one for each of the first `world` GPUs.
    pub fn start(nccl: &Nccl, world: usize, bytes: usize) -> Self {
        let id = UniqueId::new(nccl).text();
        let child = |rank: usize| {
            let mut command = Command::new(env::current_exe().expect("this program"));
            command.env(CHILD, format!("{rank} {world} {bytes} {id}")).env("NCCL_NVLS_ENABLE", "0");
            // What only threads need, or must not have.
            command.env_remove("NCCL_SINGLE_PROC_MEM_REG_ENABLE").env_remove("NCCL_GRAPH_REGISTER");
            Process::start(&mut command)
        };
        let mut processes = Processes { children: Mutex::new((0..world).map(child).collect()), windows: false };
        processes.windows = processes.all(WINDOWS, 0).into_iter().all(|open| open > 0.0);
        processes
    }

    /// Microseconds per operation of the slowest process.
    pub fn turn(&self, order: &Order, calls: usize) -> f64 {
        let Order { op, dtype, bytes, who, graph } = order;
        let (way, how) = (who.way(), if *graph { "graph" } else { "calls" });
        self.all(&format!("{}/{dtype}/{bytes}/{way}/{how}", op.name()), calls).into_iter().fold(0.0, f64::max)
    }

    /// Every process's answer.
    fn all(&self, what: &str, calls: usize) -> Vec<f64> {
        let mut children = self.children.lock();
        children.iter_mut().for_each(|child| child.order(what, calls));
        children.iter_mut().map(Process::answer).collect()
    }
}

/// Whether this process is a child. If so, it has done its work.
pub fn is_child() -> bool {
    let Ok(task) = env::var(CHILD) else { return false };
    let words: Vec<&str> = task.split_whitespace().collect();
    let number = |k: usize| words[k].parse::<usize>().expect("a number");
    let (rank, world) = (number(0), number(1));
    let nccl = Nccl::load().expect("the parent has found NCCL");
    let pool = GpuPool::builder().cuda().devices(&[rank]).check(Check::Off).record_memory(false).build();
    let pool = pool.expect("the device can be opened");
    let club = Club::of_process(nccl, &pool, (UniqueId::parse(words[3]), rank, world), number(2));
    let mut last: Option<(String, Box<Turn<'_>>)> = None;
    serve(|what, calls| {
        if what == WINDOWS {
            return f64::from(u8::from(club.windows));
        }
        let (operands, way) = what.rsplitn(3, '/').nth(2).map(|of| (of, &what[of.len() + 1..])).expect("five words");
        if last.as_ref().is_none_or(|(of, _)| of != operands) {
            // Frees the memory first.
            last = None;
            let [op, dtype, bytes] = operands.split('/').collect::<Vec<_>>()[..] else { panic!("three words") };
            let op = Op::ALL.into_iter().find(|of| of.name() == op).expect("an operation");
            let bytes = bytes.parse().expect("a number of bytes");
            let turn = match dtype {
                <f32 as Number>::NAME => turn_of::<f32>(&pool, &club, (rank, world), op, bytes),
                _ => turn_of::<bf16>(&pool, &club, (rank, world), op, bytes),
            };
            last = Some((operands.to_owned(), turn));
        }
        let (_, turn) = last.as_ref().expect("just made");
        let (who, how) = way.split_once('/').expect("two words");
        let who = if who == Who::Windows.way() { Who::Windows } else { Who::Plain };
        turn(who, how == "graph", calls)
    });
    true
}

/// Times NCCL on some operands: plain or in windows, in a graph or not, so many calls.
type Turn<'a> = dyn Fn(Who, bool, usize) -> f64 + 'a;

/// Makes the operands, and checks NCCL's results on them.
fn turn_of<'a, T: Number>(
    pool: &'a GpuPool,
    club: &'a Club,
    place: (usize, usize),
    op: Op,
    bytes: usize,
) -> Box<Turn<'a>> {
    let stage = Stage::<T>::part(pool, club, place, op, bytes);
    stage.players().into_iter().filter(|who| *who != Who::Ours).for_each(|who| stage.check(who, "NCCL in processes"));
    Box::new(move |who, in_graph, calls| match in_graph {
        true => graph::turn(&stage, who),
        false => stage.turn(who, WARM_UP, calls),
    })
}
