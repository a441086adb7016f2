//! Measures copies between host and device and between devices, against the driver's own calls on the same bytes.
//!
//! Back-to-back copies of one buffer, then one wait; GB/s of payload. The peers of pinned and peer copies are the calls
//! of [`gpu_pool::extend::driver`], which map to `cuMemcpyHtoDAsync`, `cuMemcpyDtoHAsync` and `cuMemcpyPeerAsync` one
//! to one. The peers of pageable copies are `cuMemcpyHtoD` and `cuMemcpyDtoH` with a plain `Vec`. The peers of the
//! staged copy are `cuMemcpyPeerAsync` between contexts without peer access, which goes through the host, too; and the
//! slower of the two pinned directions, each alone, which no copy through the host can reach. Targets: 0.95 of the
//! driver for pinned and peer copies, 1.0 (with helper threads 1.5) for pageable ones of 256 MB, 1.0 for staged ones.
//!
//! * `<gpu or software>/<pinned or pageable>_<up or down>/<size>`
//! * `<gpu or software>/peer/<size>`: device 0 to device 1, on a stream of device 0
//! * `<gpu or software>/staged/<size>`: the same in a pool without peer access, through the host
//!
//! Software GPUs copy with the CPU: their numbers show the library's own work, and nothing about a bus.

mod support;

use std::{sync::Mutex, time::Duration, time::Instant};

use cudarc::driver::sys;
use gpu_pool::{
    Device, DeviceBuffer, GpuPool, PinnedBuffer, Result,
    extend::driver::{self, Address, DriverRef, RawStream},
};
use support::{Bench, GIGABYTES, Side, gpus};

const SIZES: [(&str, usize); 5] =
    [("4K", 4 << 10), ("64K", 64 << 10), ("1M", 1 << 20), ("16M", 16 << 20), ("256M", 256 << 20)];
const LONG: Duration = Duration::from_secs(60);

/// Copies per turn: so many that the wait at the end does not matter.
fn copies(bytes: usize) -> usize {
    ((64 << 20) / bytes).clamp(1, 500)
}

fn rate(bytes: usize, copies: usize, clock: Instant) -> f64 {
    (bytes * copies) as f64 / clock.elapsed().as_secs_f64() / 1e9
}

/// GB/s of `copy` on device 0 of the pool, timed on its thread.
fn ours(pool: &GpuPool, bytes: usize, copy: impl Fn(&Device) -> Result<()> + Sync) -> f64 {
    let rates = pool.on(&[0]).run(|dev, _| {
        let clock = Instant::now();
        for _ in 0..copies(bytes) {
            copy(dev)?;
        }
        dev.synchronize()?;
        Ok(rate(bytes, copies(bytes), clock))
    });
    rates.expect("copies succeed")[0]
}

/// A device through the driver API: one stream, a device buffer and a page-locked buffer.
struct Raw {
    gpu: DriverRef,
    stream: RawStream,
    device: Address,
    host: *mut u8,
    bytes: usize,
}

impl Raw {
    fn new(gpu: &DriverRef, data: &[u32]) -> Self {
        let bytes = size_of_val(data);
        let stream = gpu.stream_create(0).expect("a stream");
        let device = gpu.mem_alloc(bytes).expect("device memory");
        let host = gpu.host_alloc(bytes).expect("page-locked memory");
        // SAFETY: `host` has that many bytes, and nobody else uses them.
        unsafe { host.copy_from_nonoverlapping(data.as_ptr().cast(), bytes) };
        Raw { gpu: gpu.clone(), stream, device, host, bytes }
    }

    fn wait(&self) {
        assert!(self.gpu.stream_wait_idle(self.stream, LONG).expect("the stream is healthy"), "a copy is stuck");
    }

    /// GB/s of `copy` on this stream.
    fn timed(&self, mut copy: impl FnMut()) -> f64 {
        let clock = Instant::now();
        (0..copies(self.bytes)).for_each(|_| copy());
        self.wait();
        rate(self.bytes, copies(self.bytes), clock)
    }

    fn up(&self) {
        // SAFETY: both ranges are `bytes` long and live until `drop`, which waits; the stream orders the copies.
        unsafe { self.gpu.copy_to_device(self.device, self.host, self.bytes, self.stream) }.expect("a copy");
    }

    fn down(&self) {
        // SAFETY: as in `up`.
        unsafe { self.gpu.copy_to_host(self.host, self.device, self.bytes, self.stream) }.expect("a copy");
    }

    fn to_peer(&self, peer: &Raw) {
        let (to, from) = (&*peer.gpu, &*self.gpu);
        // SAFETY: as in `up`; `peer` outlives the wait at the end of the turn.
        unsafe { from.copy_peer(peer.device, to, self.device, from, self.bytes, self.stream) }.expect("a peer copy");
    }

    /// The driver's own copy between contexts without peer access: [`driver`] refuses it.
    fn to_peer_without_access(&self, peer: &Raw) {
        let context = |raw: &Raw| {
            let mut context = std::ptr::null_mut();
            raw.gpu.bind().expect("the device is there");
            // SAFETY: `context` lives through the call.
            check(unsafe { sys::cuCtxGetCurrent(&mut context) });
            context
        };
        let (to, from) = (context(peer), context(self));
        let stream = self.stream.0 as sys::CUstream;
        // SAFETY: as in `to_peer`.
        check(unsafe { sys::cuMemcpyPeerAsync(peer.device, to, self.device, from, self.bytes, stream) });
    }

    /// The device buffer's contents.
    fn contents(&self) -> Vec<u32> {
        self.down();
        self.wait();
        // SAFETY: the copy has arrived; the buffer is page-aligned.
        unsafe { std::slice::from_raw_parts(self.host.cast::<u32>(), self.bytes / 4) }.to_vec()
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.wait();
        // SAFETY: all belong to this device, are idle, and are not used again.
        unsafe {
            self.gpu.mem_free(self.device).expect("its own memory");
            self.gpu.host_free(self.host).expect("its own memory");
            self.gpu.stream_destroy(self.stream).expect("its own stream");
        }
    }
}

fn check(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// Pinned copies, both ways.
fn pinned(bench: &mut Bench, case: &str, pool: &GpuPool, gpu: &DriverRef, size: &str, data: &[u32]) {
    let bytes = size_of_val(data);
    let raw = Raw::new(gpu, data);
    let state: (PinnedBuffer<u32>, DeviceBuffer<u32>) = {
        let mut host = pool.pinned(data.len()).expect("page-locked memory");
        host.as_mut_slice().expect("nothing is in flight").copy_from_slice(data);
        (host, zeros(pool, data.len()).remove(0))
    };
    let state = Mutex::new(state);
    let up = || {
        ours(pool, bytes, |dev| {
            let (host, device) = &mut *state.lock().unwrap();
            dev.upload_pinned_into(host, device)
        })
    };
    let down = || {
        ours(pool, bytes, |dev| {
            let (host, device) = &mut *state.lock().unwrap();
            dev.download_pinned(device, host)
        })
    };
    let peers = vec![Side::new("driver", || raw.timed(|| raw.up()))];
    bench.compare(&format!("{case}/pinned_up/{size}"), GIGABYTES, Side::new("gpu-pool", up), peers);
    // The downloads return what the uploads, timed or not, have sent.
    up();
    raw.timed(|| raw.up());
    state.lock().unwrap().0.as_mut_slice().expect("the uploads have landed").fill(0);
    let peers = vec![Side::new("driver", || raw.timed(|| raw.down()))];
    bench.compare(&format!("{case}/pinned_down/{size}"), GIGABYTES, Side::new("gpu-pool", down), peers);
    down();
    assert!(state.lock().unwrap().0.as_slice().expect("the downloads have landed") == data, "{size}: wrong data");
    assert!(raw.contents() == data, "{size}: the driver's data is wrong");
}

/// Pageable copies, both ways. Without `gpu` there is no peer.
fn pageable(bench: &mut Bench, case: &str, pool: &GpuPool, gpu: Option<&DriverRef>, size: &str, data: &[u32]) {
    let bytes = size_of_val(data);
    let device = Mutex::new(zeros(pool, data.len()).remove(0));
    let back = Mutex::new(vec![0u32; data.len()]);
    let mut raw_back = vec![0u32; data.len()];
    let raw = gpu.map(|gpu| Raw::new(gpu, data));
    let up = || ours(pool, bytes, |dev| dev.upload_into(data, &mut *device.lock().unwrap()));
    let down = || ours(pool, bytes, |dev| dev.download_into(&*device.lock().unwrap(), &mut back.lock().unwrap()));
    let peer = raw.as_ref().map(|raw| {
        Side::new("driver", || {
            raw.gpu.bind().expect("the device is there");
            // SAFETY: both ranges are live and `bytes` long; the call returns when the source has been read.
            raw.timed(|| check(unsafe { sys::cuMemcpyHtoD_v2(raw.device, data.as_ptr().cast(), bytes) }))
        })
    });
    let (case, peers) = (format!("{case}/pageable"), peer.into_iter().collect());
    bench.compare(&format!("{case}_up/{size}"), GIGABYTES, Side::new("gpu-pool", up), peers);
    up();
    let into = raw_back.as_mut_ptr();
    let peer = raw.as_ref().map(|raw| {
        raw.timed(|| raw.up());
        Side::new("driver", || {
            raw.gpu.bind().expect("the device is there");
            // SAFETY: both ranges are live and `bytes` long, and `raw_back` is not touched meanwhile. The call returns
            // when the data has arrived.
            raw.timed(|| check(unsafe { sys::cuMemcpyDtoH_v2(into.cast(), raw.device, bytes) }))
        })
    });
    let compared = peer.is_some();
    let peers = peer.into_iter().collect();
    bench.compare(&format!("{case}_down/{size}"), GIGABYTES, Side::new("gpu-pool", down), peers);
    down();
    assert!(*back.lock().unwrap() == data, "{size}: wrong data");
    assert!(!compared || raw_back.iter().all(|&x| x == 0) || raw_back == data, "{size}: the driver's data is wrong");
}

/// From device 0 to device 1: directly, or through the host when `staged`.
fn peers(bench: &mut Bench, case: &str, pool: &GpuPool, gpus: &[DriverRef], size: &str, data: &[u32], staged: bool) {
    let bytes = size_of_val(data);
    let source = pool.on(&[0]).run(|dev, _| dev.upload(data)).expect("an upload").remove(0);
    let target = Mutex::new(zeros(pool, data.len()).remove(1));
    let copy = || ours(pool, bytes, |dev| dev.copy(&source, &mut *target.lock().unwrap()));
    let (from, to) = (Raw::new(&gpus[0], data), Raw::new(&gpus[1], data));
    from.timed(|| from.up());
    let by_driver = || match staged {
        true => from.to_peer_without_access(&to),
        false => from.to_peer(&to),
    };
    // Software GPUs have no such copy.
    let driver = (!staged || case == "gpu").then(|| Side::new("driver", || from.timed(by_driver)));
    let ways = || from.timed(|| from.down()).min(to.timed(|| to.up()));
    let slower = staged.then(|| Side::new("pinned, slower way", ways));
    let kind = if staged { "staged" } else { "peer" };
    let peers = driver.into_iter().chain(slower).collect();
    bench.compare(&format!("{case}/{kind}/{size}"), GIGABYTES, Side::new("gpu-pool", copy), peers);
    copy();
    let got = pool.on(&[1]).run(|dev, _| dev.download(&*target.lock().unwrap())).expect("a download");
    assert!(got[0] == data, "{kind} {size}: wrong data");
    if !staged {
        from.timed(|| from.to_peer(&to));
    }
    assert!(to.contents() == data, "{kind} {size}: the driver's data is wrong");
}

/// One zeroed buffer per device.
fn zeros(pool: &GpuPool, len: usize) -> Vec<DeviceBuffer<u32>> {
    pool.run(|dev, _| dev.zeros(len)).expect("device memory")
}

fn main() {
    let mut bench = Bench::new("copy");
    let hardware = gpus::count();
    let software = hardware == 0;
    let case = if software { "software" } else { "gpu" };
    let sizes = if software { &SIZES[..3] } else { &SIZES[..] };
    let raw: Vec<DriverRef> = match software {
        true => driver::host::machine(&vec![driver::host::HostConfig::default(); 2]),
        false => (0..hardware.min(2)).map(|i| driver::cuda::open(i).expect("it was counted")).collect(),
    };
    let one = gpus::pool(software, 1);
    for (size, bytes) in sizes {
        let data = gpus::noise(bytes / 4, *bytes as u64);
        pinned(&mut bench, case, &one, &raw[0], size, &data);
        pageable(&mut bench, case, &one, (!software).then_some(&raw[0]), size, &data);
    }
    drop(one);
    if raw.len() > 1 {
        let builder = GpuPool::builder().without_peer_access();
        let builder = if software { builder.host(2) } else { builder.cuda().devices(&[0, 1]) };
        let staged = builder.build().expect("the devices can be opened");
        // First: contexts keep peer access that somebody has enabled.
        for (size, bytes) in sizes {
            peers(&mut bench, case, &staged, &raw, size, &gpus::noise(bytes / 4, *bytes as u64), true);
        }
        drop(staged);
        let direct = gpus::pool(software, 2);
        if raw[0].enable_peer(&*raw[1]).is_ok() {
            for (size, bytes) in sizes {
                peers(&mut bench, case, &direct, &raw, size, &gpus::noise(bytes / 4, *bytes as u64), false);
            }
        }
    }
    bench.finish();
}
