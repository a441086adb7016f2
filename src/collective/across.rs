//! The door to other processes, for groups: a [`Group`] calls it when its members are in several processes.
//!
//! `gpu-pool-cluster` implements [`AcrossProcesses`]; a group of one process never calls it.

use super::{Group, Request, lone_pad::LonePad, values::value_of};
use crate::error::{Error, Result, Site, op_site::OpSite};
use crate::fabric::{Across, Area, Call, DType, Label, Origin, Payload, ReduceOp, Shape};
use crate::{Device, DeviceBuffer, DeviceCopy, contain::Contained, memory::BlockRef};

/// Collectives, messages and host values of groups that span processes.
pub trait AcrossProcesses: Send + Sync {
    /// All members meet on the host. Errors: those of [`Group::barrier`], and those of the cluster.
    fn barrier(&self, group: &Group<'_>, call: &Call) -> Result<()>;

    /// Gives bytes to all members. Returns those of all, by rank. Errors: as [`barrier`](Self::barrier).
    fn exchange(&self, group: &Group<'_>, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>>;

    /// Compares a text of the processes. Errors: [`Error::WorldMismatch`] on all members unless all processes say the
    /// same, each by its first member.
    fn agree(&self, group: &Group<'_>, call: &Call, text: &str) -> Result<()>;

    /// Carries a collective out. Asynchronous on the current stream. `overlapped`: it leaves most of the device to
    /// other work. Errors: those of the collective, and those of the cluster.
    fn run(&self, group: &Group<'_>, request: &Request, overlapped: bool) -> Result<()>;

    /// Begins an all_reduce or a reduce_scatter. None: nothing is left to do. Errors: as [`run`](Self::run).
    fn start(&self, group: &Group<'_>, request: Request, overlapped: bool) -> Result<Option<Box<dyn PendingReduce>>>;

    /// Sends a message to a member of another process. Waits neither for it nor for the device. Errors: the cluster's.
    fn send(&self, group: &Group<'_>, call: (&Call, Label), message: &Outgoing, to: usize) -> Result<()>;

    /// The next message of a label from a member of another process. Errors: those of the cluster.
    fn receive<'g>(&self, group: &'g Group<'g>, call: (&'g Call, Label), from: usize)
    -> Result<Box<dyn Incoming + 'g>>;

    /// How an `all_reduce` of so many elements is carried out. Errors: those that the call would have before it begins.
    fn hierarchy(&self, group: &Group<'_>, of: (DType, ReduceOp), len: usize) -> Result<Hierarchy>;

    /// The signal pad by which the members' GPUs add up small buffers, if they have pads.
    fn pad<'d>(&self, group: &Group<'d>) -> Option<&'d LonePad>;

    /// Memory of so many bytes of each member, which the kernels of all may use: by rank, as this device has it
    /// mapped. None: they have no pads, or one of them has no such memory. All members call it, and wait. Errors: the
    /// cluster's.
    fn lend(&self, _group: &Group<'_>, _call: &Call, _bytes: usize) -> Result<Option<Vec<DeviceBuffer<u8>>>> {
        Ok(None)
    }

    /// Whether [`register`](Self::register) is of use.
    fn registers(&self, group: &Group<'_>) -> bool;

    /// Registers memory with the library that moves bytes between processes. Returns its name, and what ends it.
    /// Errors: the library's.
    fn register(&self, group: &Group<'_>, memory: &BlockRef) -> Result<Option<Registration>>;
}

/// The name of a library, and the memory that it knows until this is dropped.
pub type Registration = (&'static str, Box<dyn Send + Sync>);

/// A sum on its way. It may be ended in a later scope; if it is dropped, this process still does its part.
pub trait PendingReduce {
    /// Waits until it has come, and brings it to this process's members. Asynchronous on the current stream from then
    /// on. All members of this process end their sums in one order. Errors: as [`AcrossProcesses::run`].
    fn end(self: Box<Self>, group: &Group<'_>) -> Result<()>;
}

/// A message to another process.
pub struct Outgoing {
    /// Bytes of the host.
    pub header: Vec<u8>,
    /// Memory of the sender's device.
    pub parts: Vec<Area>,
}

/// A message that has come. Its parts are not on this device yet.
pub trait Incoming {
    /// Bytes of the host.
    fn header(&self) -> &[u8];

    /// The bytes of each part.
    fn lens(&self) -> &[usize];

    /// Puts the parts into this device's memory, each into as many bytes as it has. Asynchronous. Errors: the driver's.
    fn store(&self, into: &[Area]) -> Result<()>;

    /// The bytes of the only part, of elements of this size. Errors: [`Error::InvalidArgument`] for another message.
    fn only(&self, size: usize) -> Result<usize>;

    /// The only part must have so many bytes. Errors: [`Error::WorldMismatch`].
    fn expect(&self, len: usize) -> Result<()>;

    /// The receiver's error for this message. The sender has gone on, so a failure fails the gang.
    fn failed(&self, error: Error) -> Error;
}

impl dyn Incoming + '_ {
    /// [`failed`](Incoming::failed), if it is an error.
    pub(super) fn done<R>(&self, done: Result<R>) -> Result<R> {
        done.map_err(|error| self.failed(error))
    }
}

/// How an all_reduce of several processes is carried out: as [`Rails`](crate::pool::collectives::Rails), with the steps
/// inside of the largest piece.
#[allow(missing_docs, reason = "names say it")]
pub struct Hierarchy {
    pub processes: usize,
    pub rails: usize,
    pub transport: &'static str,
    pub sums: String,
    pub pieces: usize,
    pub piece: usize,
    pub overlapped: bool,
    pub inner: ReduceOp,
    pub scatter: Shape,
    pub gather: Shape,
}

/// Keeps the memory of a buffer registered with the library that moves bytes between processes: from
/// [`Group::register`].
///
/// Its drop ends that. It waits until the calls that use the memory are over on this device, since the library must not
/// let go of memory in use. The buffer may be dropped before; its memory stays until then. If the communicator ends
/// before, by an error or with the pool, the registration ends with it, and the drop does nothing.
#[must_use = "the memory is registered until this is dropped"]
pub struct Registered {
    /// None: nothing is registered.
    by: Option<Registration>,
    _memory: BlockRef,
}

crate::sync::device_thread_only! { [] Registered }

impl Registered {
    /// The library that has registered the memory, such as `nccl`. None: there is nothing that could gain from it, see
    /// [`Group::register`].
    pub fn library(&self) -> Option<&'static str> {
        self.by.as_ref().map(|(name, _)| *name)
    }
}

debug_as!(Registered, |self| library = self.library(), ..);

impl<'d> Group<'d> {
    pub(super) fn door(&self) -> Option<&'d dyn AcrossProcesses> {
        self.across.as_ref()?;
        let processes = self.dev.worker.shared.world.as_ref().expect("its group was made through it");
        let door = processes.groups().downcast_ref::<Box<dyn AcrossProcesses>>();
        Some(&**door.expect("a cluster has what its groups call"))
    }

    pub(crate) fn across(&self) -> Option<&Across> {
        self.across.as_deref()
    }

    pub(crate) fn exchange_bytes(&self, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let _here = OpSite { op: call.op, site: call.site }.enter();
        if let Some(door) = self.door() {
            return door.exchange(self, call, own);
        }
        let value = Payload::Value(Contained::new(Box::new(own)));
        Ok(self.meeting().meet(call.clone(), value, false)?.iter().map(|told| value_of(told)).collect())
    }

    pub(crate) fn sum_of_processes(&self, call: &Call, own: usize) -> Result<usize> {
        let all = self.exchange_bytes(call, (own as u64).to_le_bytes().to_vec())?;
        let number = |rank: usize| all[rank].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes) as usize);
        Ok(match &self.across {
            Some(across) => across.hosts.iter().map(|host| number(host.ranks[0])).fold(0, usize::saturating_add),
            None => number(0),
        })
    }

    /// `Err(WorldMismatch)` on all members unless all processes agree, each by its first member. One process does.
    pub(crate) fn agree(&self, origin: Origin, op: &'static str, site: Site, text: &str) -> Result<()> {
        self.door().map_or(Ok(()), |door| door.agree(self, &Call::at(op, site).from(origin), text))
    }

    /// Begins an all_reduce or a reduce_scatter, on the current stream. None: nothing is left to do for
    /// [`PendingReduce::end`]. Not for captures.
    #[track_caller]
    pub(crate) fn begin(&self, request: Request, overlapped: bool) -> Result<Option<Box<dyn PendingReduce>>> {
        match self.door() {
            Some(door) => {
                let _here = OpSite { op: request.call.op, site: request.call.site }.enter();
                door.start(self, request, overlapped)
            }
            None if overlapped => self.beside(self.dev).run(request).map(|()| None),
            None => self.run(request).map(|()| None),
        }
    }

    #[track_caller]
    pub(crate) fn hierarchy(&self, dtype: DType, op: ReduceOp, len: usize) -> Result<Option<Hierarchy>> {
        self.door().map(|door| door.hierarchy(self, (dtype, op), len)).transpose()
    }

    /// Registers the memory of a buffer with the library that moves bytes between processes. NCCL then sends from it,
    /// and receives into it, without copies through its own buffers (`ncclCommRegister`). No member waits for another.
    ///
    /// The buffer must be one of `exportable` of the crate `gpu-pool-cluster`, which has memory of its own: NCCL
    /// registers whole pages. It is used like any other, also in parts.
    ///
    /// **Where it is of use**: [`all_reduce`](Self::all_reduce) of a sum over NCCL in a group of all processes, which
    /// have one member each. Elsewhere (one process; several members in a process, where rails carry slices; MPI and
    /// shared memory) nothing is registered, [`Registered::library`] is `None`, and all goes as without: a hint that
    /// does not apply is no error, so that a program runs unchanged on one process and on software GPUs.
    ///
    /// **All members or none.** A call in which some members' memory is registered and others' is not is
    /// [`Error::WorldMismatch`] on all, and touches nothing (NCCL leaves it undefined). The parts of the buffer must
    /// begin at the same element on all members.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer of the pool; [`Error::WrongDevice`], [`Error::WrongPool`];
    /// [`Error::Transport`] if the library refuses; [`Error::Aborted`], [`Error::HostLost`].
    #[track_caller]
    pub fn register<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>) -> Result<Registered> {
        const OP: &str = "register";
        let (dev, block, _here) = (self.dev, &buffer.block, OpSite::here(OP));
        dev.not_in_graph(OP)?;
        dev.check()?;
        fail_if!(block.handle.pool != dev.worker.handle.pool, Error::wrong_pool(OP, dev.index()));
        fail_if!(buffer.device() != dev.index(), Error::wrong_device(OP, buffer.device(), dev.index()));
        let shared = !block.is_apart();
        invalid_if!(shared, OP, "only a buffer of `Device::exportable` has memory of its own; others share pages");
        let by = self.door().map_or(Ok(None), |door| door.register(self, block))?;
        Ok(Registered { by, _memory: block.clone() })
    }

    pub(crate) fn registers(&self) -> bool {
        self.door().is_some_and(|door| door.registers(self))
    }
}

impl Device {
    #[track_caller]
    pub(crate) fn zeros_dedicated<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        #[cfg(target_os = "linux")]
        {
            let bytes = len.saturating_mul(size_of::<T>());
            let (whole, _) = self.apart("zeros", bytes.max(1), &Default::default())?;
            Ok(DeviceBuffer::new(whole.block, len))
        }
        #[cfg(not(target_os = "linux"))]
        self.zeros(len)
    }
}
