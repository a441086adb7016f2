//! Device memory that knows its device, its last uses, and when it may be used again.
//!
//! * [`handle`]: what any thread may need of a device: its driver, its events.
//! * [`hazard`]: the last uses of a block, so that conflicting operations wait for each other on the GPU.
//! * [`backing`]: where the memory comes from: one window of addresses, or single allocations.
//! * [`block`]: a piece of memory; when its last handle is dropped, on whatever thread, it goes home.
//! * [`heap`]: which addresses are free. * [`cache`]: the pool itself, in the hands of its owner: no lock and no driver
//!   call in the steady state.
//! * [`numa`]: which of the machine's nodes page-locked memory is to come from.
//! * [`insight`], [`stats`]: what people see of it.
//! * [`buffer`], [`view`], [`pinned`], [`unified`]: what users hold.

pub(crate) mod backing;
pub(crate) mod block;
pub(crate) mod buffer;
pub(crate) mod cache;
pub(crate) mod event;
pub(crate) mod handle;
pub(crate) mod hazard;
pub(crate) mod heap;
pub(crate) mod insight;
pub(crate) mod numa;
pub(crate) mod pinned;
pub(crate) mod progress;
pub(crate) mod stats;
pub(crate) mod stream;
pub(crate) mod unified;
pub(crate) mod view;

pub use backing::BackingChoice;
pub use buffer::DeviceBuffer;
pub use insight::{
    classes::{ClassStats, MemoryClasses},
    leak::{Leak, LeakReport},
    out_of_memory::{OutOfMemoryReport, PendingOnStream},
    site::{CallSite, Holder},
    snapshot::{BlockInfo, BlockState, ChunkInfo, EventKind, MemoryEvent, MemorySnapshot},
};
pub use pinned::PinnedBuffer;
pub use stats::MemoryStats;
pub use unified::{UnifiedBuffer, UnifiedRows, UnifiedRowsMut};
pub use view::{AsView, AsViewMut, CopySource, DeviceView, DeviceViewMut, PeerView};

/// What a device's thread has shown of its counters.
pub(crate) fn published_stats(owner: &std::sync::Arc<block::Owner>) -> MemoryStats {
    MemoryStats::from_words(owner.mirror.read())
}

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

/// Every block starts at a multiple of 256 bytes; a type that wants more does not compile.
pub(crate) const fn fits_blocks<T>() {
    assert!(align_of::<T>() <= 256, "device memory is aligned to 256 bytes");
}
