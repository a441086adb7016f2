//! cudarc takes our buffers, and what it is handed is ordered and kept alive.

use crate::{
    on_both,
    support::{failure, on_cuda},
};
use cudarc::{
    cublas::{Asum, AsumConfig, CudaBlas},
    driver::{LaunchConfig, PushKernelArg},
    nvrtc::Ptx,
};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, Graph, Result};
use std::cell::Cell;

fn other(e: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::custom(e)
}

on_both! {
    1: fn software_gpus_have_no_cudarc_handles(gpus) {
        let pool = gpus.pool(1);
        let cuda = pool.run(|dev, _| Ok(dev.cuda().is_ok())).unwrap();
        assert_eq!(cuda, [gpus.is_cuda()]);
    }
}

#[test]
fn cublas_reads_our_buffers() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&vec![-1.5f32; 1000])?;
            dev.scale(&mut x, 2.0)?; // on our stream: cuBLAS must see it
            let cuda = dev.cuda()?;
            let blas = CudaBlas::new(cuda.stream().clone()).map_err(other)?;
            let mut sum = 0.0f32;
            // SAFETY: a thousand elements, one apart, as many as the buffer has.
            unsafe { blas.asum(AsumConfig { n: 1000, incx: 1 }, &cuda.read(&x)?, &mut sum) }.map_err(other)?;
            Ok(sum)
        });
        assert_eq!(sums.unwrap(), [3000.0]);
    });
}

#[test]
fn work_of_cudarc_is_ordered_with_ours() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let seen = pool.run(|dev, _| {
            let mut x = dev.upload(&vec![7u32; 1 << 20])?;
            {
                let cuda = dev.cuda()?;
                cuda.stream().memset_zeros(&mut cuda.write(&mut x)?).map_err(other)?;
            }
            // Another stream of ours waits for cudarc's work; a forgotten guard does not lose it.
            let second = dev.stream()?;
            let zeros = dev.on(&second).download(&x)?;
            dev.fill(&mut x, 9)?;
            let cuda = dev.cuda()?;
            let mut guard = cuda.write(&mut x)?;
            cuda.stream().memset_zeros(&mut guard).map_err(other)?;
            std::mem::forget(guard);
            drop(cuda);
            let again = dev.on(&second).download(&x)?;
            Ok(zeros.iter().chain(&again).all(|&x| x == 0))
        });
        assert_eq!(seen.unwrap(), [true]);
    });
}

/// What was forgotten is no use any more when its scope has ended: launches on other streams go on.
#[test]
fn a_forgotten_use_ends_with_its_scope() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let mut kept = pool.per_device(|dev, _| Ok((dev.zeros::<u32>(1000)?, None::<Graph>))).unwrap();
        kept.run(|dev, _, (x, graph)| {
            *graph = Some(dev.capture(|dev| dev.fill(x, 7))?.0);
            let cuda = dev.cuda()?;
            let mut guard = cuda.write(x)?;
            cuda.stream().memset_zeros(&mut guard).map_err(other)?;
            std::mem::forget(guard);
            let side = dev.stream()?;
            let error = dev.on(&side).launch_graph(graph.as_ref().unwrap()).unwrap_err();
            let Error::Borrowed { holder: Some(("write", held)), .. } = error else { panic!("{error}") };
            assert_eq!(held.file(), file!());
            Ok(())
        })
        .unwrap();
        kept.run(|dev, _, (x, graph)| {
            let side = dev.stream()?;
            dev.on(&side).launch_graph(graph.as_ref().unwrap())?;
            assert_eq!(dev.download(x)?, [7; 1000]);
            Ok(())
        })
        .unwrap();
    });
}

/// A launch would not see what cudarc does with a bare buffer.
#[test]
fn bare_buffers_of_graphs_are_refused() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            let (_graph, ()) = dev.capture(|dev| dev.fill(&mut x, 7))?;
            let theirs = dev.cuda()?.context().new_stream().map_err(other)?;
            theirs.memcpy_htod(&[1u32; 4], &mut x).map_err(other)
        }));
        assert!(matches!(&error, Error::Panicked { message, .. } if message.contains("a graph names")), "{error}");
    });
}

/// Each call shows the other buffer.
struct Turns {
    buffers: [DeviceBuffer<u32>; 2],
    calls: Cell<usize>,
}

impl Turns {
    fn next(&self) -> usize {
        self.calls.replace(self.calls.get() + 1) % 2
    }
}

impl AsView for Turns {
    type Elem = u32;
    fn view(&self) -> DeviceView<'_, u32> {
        self.buffers[self.next()].view()
    }
}

impl AsViewMut for Turns {
    fn view_mut(&mut self) -> DeviceViewMut<'_, u32> {
        let next = self.next();
        self.buffers[next].view_mut()
    }
}

/// What is lent is one view, with its own length.
#[test]
fn what_is_lent_is_asked_once() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let seen = pool.run(|dev, _| {
            let buffers = [dev.upload(&[7u32; 64])?, dev.upload(&[9u32; 1000])?];
            let mut turns = Turns { buffers, calls: Cell::new(0) };
            let cuda = dev.cuda()?;
            let read: Vec<u32> = cuda.stream().clone_dtoh(&cuda.read(&turns)?).map_err(other)?;
            cuda.stream().memset_zeros(&mut cuda.write(&mut turns)?).map_err(other)?;
            drop(cuda);
            let [short, long] = &turns.buffers;
            Ok((read, turns.calls.get(), dev.download(short)?, dev.download(long)?))
        });
        assert_eq!(seen.unwrap(), [(vec![7; 64], 2, vec![7; 64], vec![0; 1000])]);
    });
}

#[test]
fn bare_buffers_do_too() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let seen = pool.run(|dev, _| {
            let x = dev.upload(&[1u32, 2, 3, 4])?;
            let theirs = dev.cuda()?.context().new_stream().map_err(other)?;
            let host: Vec<u32> = theirs.clone_dtoh(&x.slice(1..)).map_err(other)?;
            Ok(host)
        });
        assert_eq!(seen.unwrap(), [[2, 3, 4]]);
    });
}

#[test]
fn kernels_of_cudarc_take_our_buffers() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let scaled = |dev: &Device| -> Result<Vec<f32>> {
            let mut x = dev.upload(&[1.0f32, 2.0, 3.0])?;
            let cuda = dev.cuda()?;
            let ptx = Ptx::from_src(include_str!("../../kernels/ptx/elementwise.ptx"));
            let module = cuda.context().load_module(ptx).map_err(other)?;
            let function = module.load_function("scale_f32").map_err(other)?;
            // Ordered: the use is noted until the guard goes.
            drop(cuda.write(&mut x)?);
            let (n, a) = (3u64, 4.0f32);
            let mut launch = cuda.stream().launch_builder(&function);
            launch.arg(&mut x).arg(&n).arg(&a);
            // SAFETY: the kernel's parameters are a pointer, a length and a factor; it writes three elements.
            unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.map_err(other)?;
            drop(cuda);
            dev.download(&x)
        };
        assert_eq!(pool.run(|dev, _| scaled(dev)).unwrap(), [[4.0, 8.0, 12.0]]);
    });
}

// cudarc's objects are `Send` and may outlive the pool; their stream must stay.
#[test]
fn what_cudarc_made_may_outlive_the_pool() {
    on_cuda(1, |gpus| {
        let pool = gpus.pool(1);
        let mut kept = pool
            .run(|dev, _| {
                let second = dev.stream()?;
                let slice = dev.on(&second).cuda()?.stream().clone_htod(&[5u32; 100]).map_err(other)?;
                Ok((slice, dev.cuda()?.stream().clone()))
            })
            .unwrap();
        pool.close().unwrap();
        let (slice, stream) = kept.pop().unwrap();
        assert_eq!(stream.clone_dtoh(&slice).unwrap(), [5u32; 100]);
        stream.synchronize().unwrap();
        drop((slice, stream));
    });
}

/// CUDA source is compiled when the pool is built.
#[cfg(feature = "nvrtc")]
#[test]
fn cuda_source_is_compiled() {
    use gpu_pool::{LaunchDims, Module, kernel};
    static SOURCE: Module = Module::cuda(
        "extern \"C\" __global__ void twice(float* x, unsigned n) { unsigned i = threadIdx.x; if (i < n) x[i] *= 2; }",
    );
    kernel! {
        static TWICE: "twice" in SOURCE, fn(x: &mut [f32], n: u32) |_| {
            x[..n as usize].iter_mut().for_each(|x| *x *= 2.0)
        }
    }
    static BROKEN: Module = Module::cuda("extern \"C\" __global__ void k() { undeclared(); }");
    if gpu_pool::extend::driver::cuda::device_count().unwrap_or(0) == 0 {
        println!("skipped: no CUDA device");
        return;
    }
    let pool = crate::support::builder().cuda().devices(&[0]).module(&SOURCE).build().unwrap();
    let out = pool.on_device(0).run(|dev| {
        let mut x = dev.upload(&[1.0f32, 2.0])?;
        // SAFETY: the kernel fits its signature and touches the first two elements.
        unsafe { dev.launch(&TWICE, LaunchDims::cover(2), (&mut x, 2u32))? };
        dev.download(&x)
    });
    assert_eq!(out.unwrap(), [2.0, 4.0]);
    let error = crate::support::builder().cuda().devices(&[0]).module(&BROKEN).build().unwrap_err();
    assert!(error.to_string().contains("undeclared"), "{error}");
}
