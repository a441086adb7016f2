//! A transport between the devices of the loopback cluster.

use super::{Hub, lost};
use gpu_pool::extend::cluster::{
    collective::{LonePad, SetUp},
    driver::{Address, DriverRef, RawStream},
    memory::BlockRef,
};
use gpu_pool::{DType, Error, ReduceOp, Result};
use gpu_pool_cluster::extend::{DeviceTransport, Failure, Overlap, RailCall, RailMessage, Tag, Tell};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, OnceLock,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

/// Bytes of a piece.
pub const PIECE: usize = 4 << 10;

/// Mailboxes between the devices of a rail: for software GPUs, and the host waits.
pub struct DeviceMail {
    /// Of all hosts.
    pub hub: Arc<Hub>,
    /// The host.
    pub host: usize,
    /// Of the host's pool.
    pub drivers: Mutex<Vec<DriverRef>>,
    /// Fails later calls.
    pub failure: Failure,
    /// The next call: who hears that it was submitted, and what lets its stream go on.
    pub stuck: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    /// How calls are cut; all hosts have the same.
    pub overlap: Mutex<Option<Overlap>>,
    /// Whether calls are held up.
    pub held: Mutex<Option<Held>>,
    /// Chunks that are registered, with the device.
    pub registered: Arc<Mutex<Vec<(usize, Address)>>>,
    /// All calls so far: as text, with their memory.
    pub calls: Mutex<Vec<(String, Memory)>>,
    /// For own kernels, or why there are none.
    pub pad: OnceLock<SetUp<LonePad>>,
}

/// Address, bytes, and whether they are written.
pub type Memory = Vec<(Address, usize, bool)>;

/// Calls of each device that are carried out; later ones end when the lock can be had, and do nothing.
pub struct Held {
    /// How many.
    pub pass: usize,
    /// How many there have been, by device.
    pub calls: HashMap<usize, usize>,
    /// The lock.
    pub until: Arc<Mutex<()>>,
}

struct Registered(Arc<Mutex<Vec<(usize, Address)>>>, (usize, Address));

impl Drop for Registered {
    fn drop(&mut self) {
        let mut all = self.0.lock();
        let at = all.iter().position(|one| *one == self.1).unwrap();
        all.swap_remove(at);
    }
}

impl DeviceMail {
    pub(super) fn new(hub: &Arc<Hub>, host: usize) -> Arc<DeviceMail> {
        let (hub, drivers, failure, stuck) = (hub.clone(), Mutex::default(), Failure::default(), Mutex::default());
        let overlap = Mutex::new(Some(Overlap { piece: PIECE, blocks: 0 }));
        let (held, registered) = (Mutex::default(), Arc::default());
        let (calls, pad) = (Mutex::default(), OnceLock::new());
        Arc::new(DeviceMail { hub, host, drivers, failure, stuck, overlap, held, registered, calls, pad })
    }

    /// The next call never ends: its stream goes on when the result is dropped, as after an abort.
    pub fn get_stuck(&self, submitted: Sender<()>) -> Sender<()> {
        let (end, ended) = mpsc::channel();
        *self.stuck.lock() = Some((submitted, ended));
        end
    }

    fn driver(&self, device: usize) -> DriverRef {
        self.drivers.lock()[device].clone()
    }

    fn read(&self, (device, stream): (usize, RawStream), at: Address, bytes: usize) -> Vec<u8> {
        let (driver, mut copied) = (self.driver(device), vec![0; bytes]);
        let copy = driver.host_alloc(bytes.max(1)).unwrap();
        // SAFETY: the memory is the device's or page-locked (the promise of `submit`'s caller), and so is the copy's,
        // which is waited for and then freed.
        unsafe {
            driver.copy_within(copy as Address, at, bytes, stream).unwrap();
            assert!(driver.stream_wait_idle(stream, Duration::from_secs(60)).unwrap());
            copy.copy_to(copied.as_mut_ptr(), bytes);
            driver.host_free(copy).unwrap();
        }
        copied
    }

    fn write(&self, (device, stream): (usize, RawStream), at: Address, bytes: &[u8]) {
        let driver = self.driver(device);
        let copy = driver.host_alloc(bytes.len().max(1)).unwrap();
        // SAFETY: as above.
        unsafe {
            copy.copy_from(bytes.as_ptr(), bytes.len());
            driver.copy_within(at, copy as Address, bytes.len(), stream).unwrap();
            assert!(driver.stream_wait_idle(stream, Duration::from_secs(60)).unwrap());
            driver.host_free(copy).unwrap();
        }
    }

    fn send(&self, device: usize, to: usize, bytes: Vec<u8>) {
        let tag = Tag { number: u64::MAX, phase: 0, rail: device as u32 };
        self.hub.state.lock().mail.entry((self.host, to, tag)).or_default().push_back(bytes);
        self.hub.changed.notify_all();
    }

    fn receive(&self, device: usize, from: usize) -> Result<Vec<u8>> {
        let tag = Tag { number: u64::MAX, phase: 0, rail: device as u32 };
        let mut state = self.hub.state.lock();
        loop {
            if let Some(bytes) = state.mail.get_mut(&(from, self.host, tag)).and_then(VecDeque::pop_front) {
                return Ok(bytes);
            }
            if let Some(host) = state.lost {
                return Err(lost(host));
            }
            self.hub.wait(&mut state);
        }
    }
}

impl DeviceMail {
    /// The bytes of all hosts.
    fn swap(&self, device: usize, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let hosts = 0..self.hub.devices.len();
        hosts.clone().filter(|&host| host != self.host).for_each(|host| self.send(device, host, own.to_vec()));
        hosts.map(|host| if host == self.host { Ok(own.to_vec()) } else { self.receive(device, host) }).collect()
    }

    /// In the order of hosts, so that all have the same bits.
    fn sum(&self, here: (usize, RawStream), at: Address, len: usize) -> Result<Vec<f32>> {
        let all = self.swap(here.0, &self.read(here, at, len * 4))?;
        let four = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().expect("four"));
        let mut all = all.iter().map(|bytes| bytes.chunks_exact(4).map(four).collect::<Vec<f32>>());
        let mut sum = all.next().expect("there are hosts");
        all.for_each(|theirs| sum.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x));
        Ok(sum)
    }
}

impl DeviceTransport for DeviceMail {
    fn name(&self) -> &'static str {
        "loopback between devices"
    }

    fn pad(&self) -> std::result::Result<&LonePad, &str> {
        self.pad.get().map_or(Err(""), |pad| pad.as_ref().map_err(|why| &**why))
    }

    fn broken(&self, error: Error) -> Error {
        let cause = self.failure.set(&error);
        self.hub.state.lock().lost.get_or_insert(self.host);
        self.hub.changed.notify_all();
        cause
    }

    fn can(&self, dtype: DType, reduce: ReduceOp) -> bool {
        dtype == DType::F32 && reduce == ReduceOp::Sum
    }

    unsafe fn submit(&self, device: usize, stream: RawStream, call: &RailCall<'_>) -> Result<()> {
        if let Some(cause) = self.failure.cause() {
            return Err(cause);
        }
        if let Some((submitted, ended)) = self.stuck.lock().take() {
            let wait = Box::new(move || _ = ended.recv());
            self.driver(device).launch_host(stream, wait).unwrap();
            submitted.send(()).unwrap();
            return Ok(());
        }
        if let Some(Held { pass, calls, until }) = &mut *self.held.lock() {
            let count = calls.entry(device).or_default();
            *count += 1;
            if *count > *pass {
                let until = until.clone();
                let wait = Box::new(move || drop(until.lock()));
                self.driver(device).launch_host(stream, wait).unwrap();
                return Ok(());
            }
        }
        let here = (device, stream);
        self.calls.lock().push((format!("{call:?}"), call.memory()));
        if !matches!(call, RailCall::AllReduce { .. }) {
            // All hosts' memory would have to be.
            assert!(call.memory().iter().all(|(at, ..)| self.registered(device, *at).is_none()), "{call:?}");
        }
        match *call {
            RailCall::Messages(messages) => {
                for RailMessage { peer, at, bytes, .. } in messages.iter().filter(|message| message.sends) {
                    self.send(device, *peer, self.read(here, *at, *bytes));
                }
                for RailMessage { peer, at, bytes, .. } in messages.iter().filter(|message| !message.sends) {
                    let arrived = self.receive(device, *peer)?;
                    assert_eq!(arrived.len(), *bytes);
                    self.write(here, *at, &arrived);
                }
            }
            RailCall::AllReduce { source, destination, len, dtype: DType::F32, reduce: ReduceOp::Sum } => {
                let sum = self.sum(here, source, len)?;
                self.write(here, destination, bytemuck::cast_slice(&sum));
            }
            RailCall::ReduceScatter { source, destination, len, parts, dtype: DType::F32, reduce: ReduceOp::Sum } => {
                let sum = self.sum(here, source, len * parts)?;
                self.write(here, destination, bytemuck::cast_slice(&sum[self.host * len..][..len]));
            }
            RailCall::AllGather { source, destination, bytes, parts } => {
                let all = self.swap(device, &self.read(here, source, bytes))?.concat();
                assert_eq!(all.len(), bytes * parts);
                self.write(here, destination, &all);
            }
            RailCall::Broadcast { at, bytes, root } => {
                let all = self.swap(device, &self.read(here, at, bytes))?;
                self.write(here, at, &all[root]);
            }
            _ => unreachable!("{call:?}"),
        }
        Ok(())
    }

    fn overlaps(&self) -> Option<Overlap> {
        *self.overlap.lock()
    }

    fn registers(&self) -> bool {
        true
    }

    fn register(&self, device: usize, chunk: &BlockRef) -> Result<Option<Box<dyn Send + Sync>>> {
        self.registered.lock().push((device, chunk.address()));
        Ok(Some(Box::new(Registered(self.registered.clone(), (device, chunk.address())))))
    }

    fn registered(&self, device: usize, at: Address) -> Option<u64> {
        let all = self.registered.lock();
        let inside = |(_, chunk): &&(usize, Address)| (*chunk..*chunk + (2 << 20)).contains(&at);
        all.iter().filter(|(of, _)| *of == device).find(inside).map(|(_, chunk)| at - chunk)
    }

    fn failed(&self, _: usize) -> Option<Error> {
        self.failure.cause()
    }

    fn when_failed(&self, tell: &Arc<Tell>) {
        self.failure.when(tell);
    }
}
