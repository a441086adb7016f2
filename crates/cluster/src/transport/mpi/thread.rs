//! The thread that begins and ends MPI, and that calls it for all threads where the library demands one caller.

use super::super::host::{Backoff, Part};
use super::batch::{Batch, Channel};
use super::{Mpi, TICK};
use crate::runtime::{contain, sync::Flag};
use gpu_pool::{Error, Result};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread,
    time::Duration,
};

type Call = Box<dyn FnOnce() + Send>;

/// The thread. It ends when this is dropped and its messages are done.
pub(super) struct Owner(Mutex<Sender<Job>>);

enum Job {
    Call(Call),
    Carry(Carry),
}

struct Carry {
    channel: Arc<Channel>,
    parts: Vec<Part>,
    done: SyncSender<Result<()>>,
    /// The caller has gone, and keeps the memory for ever.
    given_up: Arc<Flag>,
}

impl Owner {
    pub(super) fn start() -> Result<Owner> {
        let (sender, jobs) = mpsc::channel();
        let started = thread::Builder::new().name("gpu-pool:mpi".to_owned()).spawn(move || work(&jobs));
        started.map_err(|why| cluster_error!("transport", "no thread for MPI: {why}"))?;
        Ok(Owner(Mutex::new(sender)))
    }

    /// Calls `f` there. `None` when it takes longer than the limit. Then it goes on.
    pub(super) fn call_within<R: Send + 'static>(
        &self,
        f: impl FnOnce() -> R + Send + 'static,
        limit: Duration,
    ) -> Result<Option<R>> {
        match self.submit(f)?.recv_timeout(limit) {
            Ok(result) => Ok(Some(result)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }

    fn submit<R: Send + 'static>(&self, f: impl FnOnce() -> R + Send + 'static) -> Result<Receiver<R>> {
        let (done, result) = mpsc::sync_channel(1);
        // A caller that has gone needs no answer.
        let call = Job::Call(Box::new(move || drop(done.send(f()))));
        self.0.lock().send(call).map_err(|_| ended())?;
        Ok(result)
    }

    /// Carries messages out, whose bytes are as `Mpi::exchange_parts` demands.
    pub(super) fn carry(&self, mpi: &Mpi, parts: Vec<Part>, lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        let (done, result) = mpsc::sync_channel(1);
        let given_up = Arc::new(Flag::new());
        let carry = Carry { channel: mpi.channel().clone(), parts, done, given_up: given_up.clone() };
        self.0.lock().send(Job::Carry(carry)).map_err(|_| ended())?;
        loop {
            match result.recv_timeout(TICK) {
                Ok(done) => return done,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = lost() {
                        given_up.raise();
                        return Err(error);
                    }
                }
            }
        }
    }
}

fn ended() -> Error {
    cluster_error!("transport", "the thread that calls MPI has ended")
}

fn work(jobs: &Receiver<Job>) {
    let mut running: Vec<(Carry, Batch)> = Vec::new();
    let mut backoff = Backoff::new();
    loop {
        let job = match running.is_empty() {
            true => jobs.recv().map_err(|_| TryRecvError::Disconnected),
            false => jobs.try_recv(),
        };
        let mut progress = job.is_ok();
        match job {
            // Without an answer the caller finds that its call has ended.
            Ok(Job::Call(call)) => drop(contain(call)),
            // SAFETY: the bytes live until the answer, or for ever if the caller gives up or gets an error.
            Ok(Job::Carry(carry)) => match unsafe { Batch::post(&carry.channel, &carry.parts) } {
                Ok(batch) => running.push((carry, batch)),
                Err(error) => drop(carry.done.send(Err(error))),
            },
            Err(TryRecvError::Disconnected) if running.is_empty() => return,
            Err(_) => {}
        }
        running.retain_mut(|(carry, batch)| {
            if carry.given_up.is_raised() {
                return false;
            }
            match batch.poll(&carry.channel, &mut progress) {
                Ok(false) => return true,
                // There is room for one answer.
                Ok(true) => drop(carry.done.send(Ok(()))),
                Err(error) => drop(carry.done.send(Err(error))),
            }
            false
        });
        if progress {
            backoff.reset();
        } else {
            // The callers ask whether a process is lost.
            drop(backoff.pause(&|| None));
        }
    }
}
