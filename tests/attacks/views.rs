//! Views that lie. `AsView` and `AsViewMut` are public and safe to implement, so each call may show other memory, and
//! may run operations of its own. An operation asks once, and takes length and memory from that one view.

use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, Error, GpuPool, Graph, Matrix,
    ReduceOp, Result, Stream, each_mut, gradients::GradientExchange,
};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::{cell::Cell, fmt::Debug};

/// Elements of one part of what two members share.
const PART: usize = 64;
/// Elements of the memory that a lie claims.
const LONG: usize = 2048;

/// What a buffer shows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shows {
    Truth,
    /// `view` is long, and `view_mut` is not.
    LongReads,
    /// The other way round.
    LongWrites,
    /// Another length at each call.
    LongFirst,
    LongSecond,
}

const LIES: [Shows; 4] = [Shows::LongReads, Shows::LongWrites, Shows::LongFirst, Shows::LongSecond];

/// Shows one of two buffers, and counts how often it was asked.
struct Sly<T: DeviceCopy = f32> {
    own: DeviceBuffer<T>,
    long: DeviceBuffer<T>,
    shows: Shows,
    calls: Cell<usize>,
}

impl<T: DeviceCopy> Sly<T> {
    fn is_long(&self, writes: bool) -> bool {
        let call = self.calls.replace(self.calls.get() + 1);
        match self.shows {
            Shows::Truth => false,
            Shows::LongReads => !writes,
            Shows::LongWrites => writes,
            Shows::LongFirst => call.is_multiple_of(2),
            Shows::LongSecond => !call.is_multiple_of(2),
        }
    }
}

impl<T: DeviceCopy> AsView for Sly<T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        if self.is_long(false) { self.long.view() } else { self.own.view() }
    }
}

impl<T: DeviceCopy> AsViewMut for Sly<T> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        if self.is_long(true) { self.long.view_mut() } else { self.own.view_mut() }
    }
}

/// An operation of two members, with the lengths of what it reads and writes; 0 where it has no such argument.
struct Case {
    name: &'static str,
    src: usize,
    dst: usize,
    run: fn(&Device, &Sly, &mut Sly) -> Result<()>,
}

/// The same call on a device and on a group of all devices.
macro_rules! both {
    ($($name:literal $src:literal $dst:literal |$dev:ident, $on:ident, $x:ident, $y:ident| $run:expr;)+) => {
        &[$(
            Case { name: $name, src: $src * PART, dst: $dst * PART, run: |$dev, $x, $y| {
                let ($on, _) = ($dev, (&$x, &$y));
                $run
            } },
            Case { name: concat!($name, " of a group"), src: $src * PART, dst: $dst * PART, run: |$dev, $x, $y| {
                let ($on, _) = (&$dev.group(&[1, 0])?, (&$x, &$y));
                $run
            } },
        )+]
    };
}

/// Every collective. Members give `x` to read, and `y` to write.
const COLLECTIVES: &[Case] = both! {
    "all_reduce" 0 1 |dev, on, x, y| on.all_reduce(y, ReduceOp::Sum);
    "all_reduce_into" 1 1 |dev, on, x, y| on.all_reduce_into(x, y, ReduceOp::Sum);
    "all_reduce_many" 0 1 |dev, on, x, y| on.all_reduce_many(&mut [&mut *y], ReduceOp::Sum);
    "reduce" 0 1 |dev, on, x, y| on.reduce(y, ReduceOp::Sum, 1);
    "reduce_scatter" 2 1 |dev, on, x, y| on.reduce_scatter(x, y, ReduceOp::Sum);
    "reduce_scatter_v" 2 1 |dev, on, x, y| on.reduce_scatter_v(x, y, &[PART; 2], ReduceOp::Sum);
    "reduce_scatter_in_place" 0 1 |dev, on, x, y| on.reduce_scatter_in_place(y, ReduceOp::Sum);
    "all_gather" 1 2 |dev, on, x, y| on.all_gather(x, y);
    "all_gather_v" 1 2 |dev, on, x, y| on.all_gather_v(x, y, &[PART; 2]);
    "all_gather_in_place" 0 1 |dev, on, x, y| on.all_gather_in_place(y);
    "broadcast" 0 1 |dev, on, x, y| on.broadcast(y, 1);
    "gather" 1 0 |dev, on, x, y| {
        let mut all = dev.zeros(2 * PART)?;
        on.gather(x, (on.rank() == 1).then(|| all.view_mut()), 1)
    };
    "gather_v" 1 0 |dev, on, x, y| {
        let mut all = dev.zeros(2 * PART)?;
        on.gather_v(x, (on.rank() == 1).then(|| all.view_mut()), &[PART; 2], 1)
    };
    "scatter" 0 1 |dev, on, x, y| {
        let all = dev.zeros(2 * PART)?;
        on.scatter((on.rank() == 1).then(|| all.view()), y, 1)
    };
    "scatter_v" 0 1 |dev, on, x, y| {
        let all = dev.zeros(2 * PART)?;
        on.scatter_v((on.rank() == 1).then(|| all.view()), y, &[PART; 2], 1)
    };
    "all_to_all" 2 2 |dev, on, x, y| on.all_to_all(x, y);
    "all_to_all_v" 2 2 |dev, on, x, y| on.all_to_all_v(x, &[PART; 2], y, &[PART; 2]);
    "send" 1 0 |dev, on, x, y| {
        let mut came = dev.zeros::<f32>(PART)?;
        on.send(x, 1 - on.rank())?;
        on.recv(&mut came, 1 - on.rank())
    };
    "recv" 0 1 |dev, on, x, y| {
        on.send(&dev.zeros::<f32>(PART)?, 1 - on.rank())?;
        on.recv(y, 1 - on.rank())
    };
    "sendrecv" 1 1 |dev, on, x, y| on.sendrecv(x, 1 - on.rank(), y, 1 - on.rank());
};

/// Everything else that takes views.
const OTHERS: &[Case] = &[
    Case { name: "fill", src: 0, dst: PART, run: |dev, _, y| dev.fill(y, 7.0) },
    Case { name: "scale", src: 0, dst: PART, run: |dev, _, y| dev.scale(y, 7.0) },
    Case { name: "axpy", src: PART, dst: PART, run: |dev, x, y| dev.axpy(7.0, x, y) },
    Case { name: "sum", src: PART, dst: 0, run: |dev, x, _| dev.sum(x).map(drop) },
    Case { name: "dot", src: PART, dst: PART, run: |dev, x, y| dev.dot(x, &*y).map(drop) },
    Case { name: "cast", src: PART, dst: 0, run: |dev, x, _| dev.cast::<f64, _>(x).map(drop) },
    Case { name: "copy", src: PART, dst: PART, run: |dev, x, y| dev.copy(x, y) },
    Case { name: "download", src: PART, dst: 0, run: |dev, x, _| dev.download(x).map(drop) },
    Case { name: "download_into", src: PART, dst: 0, run: |dev, x, _| dev.download_into(x, &mut [0.0; PART]) },
    Case { name: "upload_into", src: 0, dst: PART, run: |dev, _, y| dev.upload_into(&[7.0; PART], y) },
    Case {
        name: "upload_pinned_into",
        src: 0,
        dst: PART,
        run: |dev, _, y| dev.upload_pinned_into(&dev.pinned(PART)?, y),
    },
    Case {
        name: "download_pinned",
        src: PART,
        dst: 0,
        run: |dev, x, _| dev.download_pinned(x, &mut dev.pinned(PART)?),
    },
    Case {
        name: "gemm",
        src: PART,
        dst: PART,
        run: |dev, x, y| {
            let a = Matrix::new(x, 8, 8)?;
            dev.gemm(1.0, a, a.t(), 0.0, y)
        },
    },
    Case {
        name: "operations of a graph",
        src: PART,
        dst: PART,
        run: |dev, x, y| {
            let (graph, ()) = dev.capture(|dev| dev.copy(x, y))?;
            dev.launch_graph(&graph)?;
            dev.launch_graph(&graph)
        },
    },
    Case {
        name: "a collective of a graph",
        src: 0,
        dst: PART,
        run: |dev, _, y| {
            let (graph, ()) = dev.capture(|dev| dev.all_reduce(y, ReduceOp::Sum))?;
            dev.launch_graph(&graph)?;
            dev.launch_graph(&graph)
        },
    },
    Case {
        name: "broadcast_parameters",
        src: 0,
        dst: PART,
        run: |dev, _, y| {
            let exchange = GradientExchange::builder().build(dev, &[1])?;
            exchange.broadcast_parameters(dev, &mut [y], 1)
        },
    },
    Case {
        name: "verify_parameters",
        src: PART,
        dst: 0,
        run: |dev, x, _| {
            let exchange = GradientExchange::builder().build(dev, &[1])?;
            match exchange.verify_parameters(dev, &[x]) {
                // Members have different ones here.
                Err(Error::Mismatch { what: "parameters", .. }) => Ok(()),
                other => other,
            }
        },
    },
];

fn pool() -> GpuPool {
    GpuPool::builder().host(2).build().unwrap()
}

/// What a device has: buffers that lie, and their neighbours in memory, which nobody names.
struct Field {
    sly: Vec<Sly>,
    around: Vec<DeviceBuffer<f32>>,
}

/// What a neighbour holds: never 0, and nothing twice.
fn value(dev: &Device, k: usize) -> f32 {
    (1000 * dev.rank() + k + 1) as f32
}

/// `run` gets a buffer that lies for each length. Its neighbours must stay as they are. How often each buffer was
/// asked.
fn attack(
    pool: &GpuPool,
    (name, lens, shows): (&str, &[usize], Shows),
    run: impl Fn(&Device, &mut [Sly]) -> Result<()> + Sync,
) -> Vec<usize> {
    let fields = pool.run(|dev, _| {
        let mut field = Field { sly: Vec::new(), around: Vec::new() };
        for len in lens {
            for k in 0..40 {
                if k == 10 {
                    let own = dev.upload(&vec![value(dev, 500); *len])?;
                    let long = dev.upload(&vec![value(dev, 600); LONG])?;
                    field.sly.push(Sly { own, long, shows, calls: Cell::new(0) });
                }
                field.around.push(dev.upload(&vec![value(dev, field.around.len()); *len])?);
            }
        }
        Ok(field)
    });
    let mut fields = fields.unwrap();
    match pool.with(each_mut(&mut fields)).run(|dev, _, field| run(dev, &mut field.sly)) {
        Ok(_) => {}
        Err(Error::InvalidArgument { .. } | Error::Mismatch { .. }) if shows != Shows::Truth => {}
        Err(error) => panic!("{name}, {shows:?}: {error}"),
    }
    let stay = pool.with(each_mut(&mut fields)).run(|dev, _, field| {
        for (k, around) in field.around.iter().enumerate() {
            assert_eq!(dev.download(around)?, vec![value(dev, k); around.len()], "neighbour {k}");
        }
        Ok(())
    });
    stay.unwrap_or_else(|error| panic!("{name}, {shows:?}: {error}"));
    // A peer may have failed before this device asked.
    (0..lens.len()).map(|i| fields.iter().map(|field| field.sly[i].calls.get()).max().unwrap_or(0)).collect()
}

fn each_case(mut check: impl FnMut(&Case)) {
    COLLECTIVES.iter().chain(OTHERS).for_each(&mut check);
}

#[test]
fn no_operation_writes_memory_that_nobody_named() {
    let pool = pool();
    each_case(|case| {
        for shows in LIES {
            let asked = attack(&pool, (case.name, &[case.src, case.dst], shows), |dev, sly| {
                let [x, y] = sly else { unreachable!("two") };
                (case.run)(dev, x, y)
            });
            assert!(asked.iter().all(|calls| *calls <= 1), "{}, {shows:?}: {asked:?}", case.name);
        }
    });
}

#[test]
fn every_operation_asks_each_argument_once() {
    let pool = pool();
    each_case(|case| {
        let asked = attack(&pool, (case.name, &[case.src, case.dst], Shows::Truth), |dev, sly| {
            let [x, y] = sly else { unreachable!("two") };
            (case.run)(dev, x, y)
        });
        assert_eq!(asked, [case.src, case.dst].map(|len| usize::from(len > 0)), "{}", case.name);
    });
}

/// Fills by a kernel of the crate's own, for elements of each size.
#[test]
fn fills_of_every_size_ask_once() {
    fn asked<T: DeviceCopy + PartialEq + Debug>(dev: &Device, value: T) -> Result<usize> {
        let (own, long) = (dev.zeros(64)?, dev.zeros(LONG)?);
        let mut sly = Sly { own, long, shows: Shows::LongReads, calls: Cell::new(0) };
        dev.fill(&mut sly, value)?;
        assert_eq!(dev.download(&sly.own)?, [value; 64], "what was shown is filled");
        Ok(sly.calls.get())
    }
    let found = pool().run(|dev, _| Ok([asked(dev, 7u8)?, asked(dev, 7u16)?, asked(dev, 7u32)?, asked(dev, 7u64)?]));
    assert_eq!(found.unwrap(), [[1; 4]; 2]);
}

/// Enough small buffers to be packed, one that is not, and one that is empty.
#[test]
fn a_list_of_buffers_is_asked_once() {
    let pool = pool();
    let lens = [64, 64, 100_000, 32, 0, 64, 64, 64];
    for shows in [Shows::Truth, LIES[0], LIES[1], LIES[2], LIES[3]] {
        let asked =
            attack(&pool, ("all_reduce_many", &lens, shows), |dev, sly| dev.all_reduce_many(sly, ReduceOp::Sum));
        assert_eq!(asked, [1; 8], "{shows:?}");
        let asked = attack(&pool, ("broadcast_parameters", &lens, shows), |dev, sly| {
            let exchange = GradientExchange::builder().build(dev, &[1])?;
            exchange.broadcast_parameters(dev, sly, 1)
        });
        assert_eq!(asked, [1; 8], "{shows:?}");
    }
}

/// Launches a graph on a stream of its own when it is asked.
struct Launches<'a> {
    memory: DeviceBuffer<f32>,
    dev: &'a Device,
    side: &'a Stream,
    graph: &'a Graph,
}

impl AsView for Launches<'_> {
    type Elem = f32;
    fn view(&self) -> DeviceView<'_, f32> {
        self.dev.on(self.side).launch_graph(self.graph).unwrap();
        self.memory.view()
    }
}

impl AsViewMut for Launches<'_> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, f32> {
        self.dev.on(self.side).launch_graph(self.graph).unwrap();
        self.memory.view_mut()
    }
}

/// A graph does not borrow what it writes, so an argument may write another one when it is asked for its view. The
/// operation comes after that, on whatever stream it was.
#[test]
fn all_views_are_taken_before_anything_is_ordered() {
    type Reads = fn(&Device, &DeviceBuffer<f32>, &mut Launches<'_>) -> Result<()>;
    type Writes = fn(&Device, &Launches<'_>, &mut DeviceBuffer<f32>) -> Result<()>;
    const WRITES: &[(&str, Reads)] = &[
        ("gemm", |dev, x, y| dev.gemm(1.0, Matrix::new(x, 8, 8)?, Matrix::new(x, 8, 8)?.t(), 0.0, y)),
        ("axpy", |dev, x, y| dev.axpy(1.0, x, y)),
        ("copy", |dev, x, y| dev.copy(x, y)),
        ("dot", |dev, x, y| dev.dot(x, y).map(drop)),
        ("all_reduce_into", |dev, x, y| dev.all_reduce_into(x, y, ReduceOp::Sum)),
        ("all_gather_v", |dev, x, y| dev.all_gather_v(&x.slice(..32), y, &[32; 2])),
        ("reduce_scatter_v", |dev, x, y| {
            dev.reduce_scatter_v(x, &mut y.view_mut().slice_mut(..32), &[32; 2], ReduceOp::Sum)
        }),
        ("all_to_all", |dev, x, y| dev.all_to_all(x, y)),
        ("sendrecv", |dev, x, y| dev.sendrecv(x, 1 - dev.rank(), y, 1 - dev.rank())),
        ("all_reduce", |dev, _, y| dev.all_reduce(y, ReduceOp::Sum)),
        ("upload_into", |dev, _, y| dev.upload_into(&[1.0; 64], y)),
        ("fill", |dev, _, y| dev.fill(y, 1.0)),
        ("scale", |dev, _, y| dev.scale(y, 1.0)),
    ];
    const READS: &[(&str, Writes)] = &[
        ("axpy", |dev, x, y| dev.axpy(1.0, x, y)),
        ("copy", |dev, x, y| dev.copy(x, y)),
        ("all_reduce_into", |dev, x, y| dev.all_reduce_into(x, y, ReduceOp::Sum)),
        ("all_to_all", |dev, x, y| dev.all_to_all(x, y)),
        ("sendrecv", |dev, x, y| dev.sendrecv(x, 1 - dev.rank(), y, 1 - dev.rank())),
        ("sum", |dev, x, _| dev.sum(x).map(drop)),
        ("cast", |dev, x, _| dev.cast::<f64, _>(x).map(drop)),
        ("download", |dev, x, _| dev.download(x).map(drop)),
        ("download_pinned", |dev, x, _| dev.download_pinned(x, &mut dev.pinned(64)?)),
    ];
    /// `other` is what the graph writes, and `asked` is what launches it.
    fn attack(dev: &Device, run: impl Fn(&mut DeviceBuffer<f32>, &mut Launches<'_>) -> Result<()>) -> Result<f32> {
        let (mut other, memory) = (dev.zeros::<f32>(64)?, dev.zeros::<f32>(64)?);
        let (graph, ()) = dev.capture(|dev| dev.fill(&mut other, 3.0))?;
        let side = dev.stream()?;
        let mut asked = Launches { memory, dev, side: &side, graph: &graph };
        run(&mut other, &mut asked)?;
        Ok(dev.download(&asked.memory)?[0])
    }
    let pool = GpuPool::builder().check(Check::Races).host(2).build().unwrap();
    for (name, run) in WRITES {
        let found = pool.run(|dev, _| attack(dev, |other, asked| run(dev, other, asked)));
        let found = found.unwrap_or_else(|error| panic!("{name}: {error}"));
        match *name {
            // What the graph has written is what is read.
            "gemm" => assert_eq!(found, [72.0; 2]),
            "copy" | "sendrecv" | "all_gather_v" | "all_to_all" => assert_eq!(found, [3.0; 2], "{name}"),
            "all_reduce_into" => assert_eq!(found, [6.0; 2]),
            _ => {}
        }
    }
    for (name, run) in READS {
        let found = pool.run(|dev, _| attack(dev, |other, asked| run(dev, asked, other)));
        found.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
