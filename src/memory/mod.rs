//! Memory of one device: allocation, buffers, streams, the order of uses of a block, and reports of memory holders.
//!
//! # Inside
//!
//! * `handle`, `stream`, `event`: the parts of a device that any thread may use: its driver, its streams, its events.
//! * `hazard`: the last uses of each block, so that conflicting operations wait for each other on the GPU.
//! * `backing`: takes memory from the driver: one window of virtual addresses, or single allocations.
//! * `heap`: keeps which addresses are free. `cache`: the allocator of one device, used by the device's own thread
//!   only. It takes no lock, and makes no driver call for a program that repeats its requests.
//! * `block`: one allocated piece. Any thread may drop its last handle; the block then goes back to its owner's cache.
//! * `progress`, `calls`: the state of a device's thread, for threads that wait for it.
//! * `staging`, `peer_staging`: page-locked buffers for copies that pass through the host.
//! * `numa`: NUMA nodes for page-locked memory. `insight`, `stats`: snapshots, reports and counters for people.
//! * `buffer`, `view`, `pinned`, `unified`: the types that users hold. `host_access`: how the host reaches
//!   the contents of the last two.

#![allow(rustdoc::private_intra_doc_links, reason = "the map of the files is for maintainers")]

pub(crate) mod backing;
pub(crate) mod block;
pub(crate) mod buffer;
pub(crate) mod cache;
pub(crate) mod calls;
pub(crate) mod event;
pub(crate) mod handle;
pub(crate) mod hazard;
pub(crate) mod heap;
mod host_access;
pub(crate) mod insight;
pub(crate) mod numa;
pub(crate) mod peer_staging;
pub(crate) mod pinned;
pub(crate) mod progress;
pub(crate) mod staging;
pub(crate) mod stats;
pub(crate) mod stream;
pub(crate) mod turn;
pub(crate) mod unified;
pub(crate) mod view;

// Other rooms name the items, not the files.
use self::block::{Block, Origin};
pub(crate) use self::{
    backing::ProbeContext,
    block::{BlockRef, InGang},
    cache::{Cache, MemoryLimit, OnOutOfMemory, Request},
    event::Event,
    handle::{DeviceHandle, Handover},
    hazard::{Access, History, Reserved, UsesOf},
    peer_staging::PeerStaging,
    pinned::{Locality, PinnedPool},
    progress::Progress,
    stream::{StreamCore, StreamState},
    turn::Turns,
};
use self::{backing::Region, heap::Payload, insight::units::Bytes};

pub use backing::BackingChoice;
pub(crate) use block::fits_blocks;
pub use buffer::DeviceBuffer;
pub use insight::{
    classes::{ClassStats, MemoryClasses},
    leak::{Leak, LeakReport},
    out_of_memory::{BookedJob, OutOfMemoryReport, PendingOnStream},
    site::{CallSite, Holder},
    snapshot::{BlockInfo, BlockState, ChunkInfo, EventKind, MemoryEvent, MemorySnapshot},
};
pub use pinned::{AsPinned, AsPinnedMut, PinnedBuffer, PinnedView, PinnedViewMut};
pub use stats::MemoryStats;
pub use unified::{UnifiedBuffer, UnifiedRows, UnifiedRowsMut};
pub use view::{AsView, AsViewMut, CopySource, DeviceView, DeviceViewMut, PeerView};

/// Any plain value that may live on a device. User structs derive `bytemuck::Pod`.
///
/// `Pod` is needed for soundness: a device may leave any bit pattern behind, so each must be a value. Types that must
/// be aligned to more than 256 bytes do not compile where memory for them is asked for:
///
/// ```compile_fail,E0080
/// #[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
/// #[repr(C, align(4096))]
/// struct Page([u8; 4096]);
/// # let pool = gpu_pool::GpuPool::builder().host(1).build().unwrap();
/// let page = pool.pinned::<Page>(1);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot live on a device",
    note = "for your own struct: `#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)] #[repr(C)]`"
)]
pub trait DeviceCopy: bytemuck::Pod + Send + Sync {}
impl<T: bytemuck::Pod + Send + Sync> DeviceCopy for T {}

/// The length of buffers and views, and their `Debug`, which names the device of those that are on one.
macro_rules! elements {
    ($($Type:ident<$($life:lifetime,)? T> = |$this:ident| $len:expr $(, on $device:expr)?;)+) => {$(
        impl<T: DeviceCopy> $Type<$($life,)? T> {
            /// Number of elements.
            pub fn len(&self) -> usize {
                let $this = self;
                $len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }

        impl<T: DeviceCopy> std::fmt::Debug for $Type<$($life,)? T> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                write!(f, concat!(stringify!($Type), "<{}>[{}]"), std::any::type_name::<T>(), $len)?;
                $(write!(f, " on device {}", $device)?;)?
                Ok(())
            }
        }
    )+};
}
elements! {
    DeviceBuffer<T> = |buffer| buffer.len, on buffer.device();
    DeviceView<'_, T> = |view| view.len, on view.block.handle.device;
    DeviceViewMut<'_, T> = |view| view.len, on view.block.handle.device;
    PeerView<'_, T> = |view| view.0.len, on view.0.block.handle.device;
    PinnedBuffer<T> = |buffer| buffer.len;
    PinnedView<'_, T> = |view| view.len;
    PinnedViewMut<'_, T> = |view| view.0.len;
    UnifiedBuffer<T> = |buffer| buffer.len;
}
