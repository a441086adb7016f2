//! Interoperation with cudarc: our buffers in its calls, its handles for our devices.
//!
//! `dev.cuda()?` gives cudarc's handles of the token's device and current stream; [`Cuda::read`] and [`Cuda::write`]
//! order a buffer on that stream. `DeviceBuffer` and its views also implement cudarc's traits themselves: a foreign
//! stream waits for the buffer's last uses on entry, and cudarc waits for that stream at the end. Memory that a graph
//! names is refused there, by a panic. A kernel that is launched by programmatic dependent launch must wait
//! (`griddepcontrol.wait`) in all its threads: later collectives rely on it. cudarc's safe `memcpy_dtod` orders only
//! one side of a copy between devices; use [`Device::copy`].

use crate::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut,
    driver::cuda::CudaGpu,
    error::{Error, Result, Site, op_site::OpSite},
    memory::{Access, BlockRef, Turns},
};
use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
    sys::{CUdeviceptr, CUstreamCaptureStatus},
};
use std::{marker::PhantomData, ops::Range, sync::Arc, time::Duration};

/// cudarc's handles for a device: its primary context and the token's current stream.
#[derive(Debug)]
pub struct Cuda<'a> {
    dev: &'a Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

/// Handles for cudarc and CUDA libraries.
impl Device {
    /// cudarc's handles of this device and stream.
    ///
    /// The guide has an example on its page "Kernels".
    ///
    /// If your own copy brings the result of a collective to the host, and that collective was given up, the bytes may
    /// be incomplete. [`check`](Self::check), called after the copy is over, returns the failure.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on a software GPU; the driver's.
    #[track_caller]
    pub fn cuda(&self) -> Result<Cuda<'_>> {
        let _here = OpSite::here("cuda");
        self.not_in_graph("cuda")?;
        let handle = &self.worker.handle;
        let Some(gpu) = handle.driver.as_any().downcast_ref::<CudaGpu>() else {
            return Err(Error::invalid("cuda", format_args!("device {} is a software GPU", self.index())));
        };
        handle.check("cuda", crate::driver::Driver::bind(gpu))?;
        let context = handle.check("cuda", gpu.cudarc_context())?;
        // SAFETY: the token's stream is live.
        let stream = handle.check("cuda", unsafe { gpu.cudarc_stream(self.stream.raw) })?;
        // The scope's end must wait for the caller's own work, also if `Cuda` is forgotten and gives it no number.
        self.stream.lend();
        Ok(Cuda { dev: self, context, stream })
    }
}

impl Drop for Cuda<'_> {
    fn drop(&mut self) {
        self.dev.stream.submit();
    }
}

impl<'a> Cuda<'a> {
    /// The device's primary context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The token's current stream. A clone that outlives the pool keeps the stream alive. A capture on it refuses this
    /// crate's buffers by a panic, since the library does not see a later replay: use [`Device::capture`].
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// `x` for cudarc's functions to read: checked to belong to this device, and ordered on the current stream.
    ///
    /// Until the returned value is dropped, a launch on another stream of a graph that writes `x` is
    /// [`Error::Borrowed`]. If it is forgotten ([`std::mem::forget`]), that lasts until the scope has ended.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn read<'v, V: AsView>(&'v self, x: &'v V) -> Result<CudaRef<'v, V::Elem>> {
        let x = x.view();
        let mut op = self.dev.op("read")?;
        let _turns = turns(x.block);
        op.reads(&x)?;
        Ok(CudaRef(ForeignUse::new(self, x, Access::Read, op.site)?, PhantomData))
    }

    /// `x` for cudarc's functions to write: checked and ordered.
    ///
    /// Until the returned value is dropped, a launch on another stream of a graph that names `x` is
    /// [`Error::Borrowed`]. If it is forgotten, that lasts until the scope has ended.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[track_caller]
    pub fn write<'v, V: AsViewMut>(&'v self, x: &'v mut V) -> Result<CudaMut<'v, V::Elem>> {
        let x = x.view_mut();
        let mut op = self.dev.op("write")?;
        let _turns = turns(x.block);
        op.writes(&x)?;
        let x = DeviceView::<V::Elem> { block: x.block, address: x.address, len: x.len, of: PhantomData };
        Ok(CudaMut(ForeignUse::new(self, x, Access::Write, op.site)?, PhantomData))
    }
}

/// If a graph names the block, no launch comes between the order of a use and its note.
fn turns(block: &BlockRef) -> Turns<'_> {
    Turns::take(Some(&**block).filter(|block| block.is_in_graph()).into_iter())
}

/// The drop notes the use.
struct ForeignUse<'a> {
    cuda: &'a Cuda<'a>,
    block: &'a BlockRef,
    bytes: Range<usize>,
    len: usize,
    access: Access,
}

debug_as!(ForeignUse<'_>, |self| "{} elements on device {}", self.len, self.block.handle.device);

impl<'a> ForeignUse<'a> {
    /// Noted here, so that it is not lost if the value is forgotten instead of dropped.
    fn new<T: DeviceCopy>(cuda: &'a Cuda<'a>, view: DeviceView<'a, T>, access: Access, site: Site) -> Result<Self> {
        let access = view.block.access_on(&cuda.dev.stream, access);
        let used = ForeignUse { cuda, block: view.block, bytes: view.bytes(), len: view.len(), access };
        // The drop closes the use, also when the checker refuses it.
        view.block.hazards.open(&cuda.dev.stream, view.bytes(), access, site);
        used.account()?;
        Ok(used)
    }

    fn account(&self) -> Result<()> {
        let (stream, handle) = (&self.cuda.dev.stream, &self.cuda.dev.stream.handle);
        let Some(watch) = handle.watch() else { return Ok(()) };
        let write = self.access == Access::Write;
        let noted = watch.checker.lent(watch.device, stream.raw, self.address(), self.bytes.len(), write);
        noted.map_err(|report| handle.misuse("cuda", report))
    }
}

impl Drop for ForeignUse<'_> {
    fn drop(&mut self) {
        let stream = &self.cuda.dev.stream;
        if let Err(error) = self.account() {
            event!(error, "cudarc_use_failed", %error, "a use by cudarc");
        }
        self.block.hazards.close(stream, stream.submit(), self.bytes.clone(), self.access);
    }
}

impl ForeignUse<'_> {
    fn address(&self) -> CUdeviceptr {
        self.block.address + self.bytes.start as u64
    }
}

/// A buffer that cudarc may read; from [`Cuda::read`].
#[derive(Debug)]
pub struct CudaRef<'a, T: DeviceCopy>(ForeignUse<'a>, PhantomData<&'a T>);
/// A buffer that cudarc may write; from [`Cuda::write`].
#[derive(Debug)]
pub struct CudaMut<'a, T: DeviceCopy>(ForeignUse<'a>, PhantomData<&'a mut T>);

/// On the token's own stream all is in order. Another stream waits for ours, and cudarc waits for it when the use ends.
fn join_streams<'s>(own: &CudaStream, stream: &'s CudaStream) -> SyncOnDrop<'s> {
    if own == stream {
        let status = own.capture_status();
        let none = matches!(status, Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE));
        assert!(none, "a graph that cudarc captures would use this buffer when it is gone: use `Device::capture`");
        return SyncOnDrop::Record(None);
    }
    stream.join(own).expect("a stream cannot wait for another");
    SyncOnDrop::Sync(Some(stream))
}

macro_rules! ordered {
    ($($name:ident)+) => {$(
        impl<T: DeviceCopy> DeviceSlice<T> for $name<'_, T> {
            fn len(&self) -> usize {
                self.0.len
            }
            fn stream(&self) -> &Arc<CudaStream> {
                self.0.cuda.stream()
            }
        }
        impl<T: DeviceCopy> DevicePtr<T> for $name<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                (self.0.address(), join_streams(self.0.cuda.stream(), stream))
            }
        }
    )+};
}
ordered! { CudaRef CudaMut }

impl<T: DeviceCopy> DevicePtrMut<T> for CudaMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.0.address(), join_streams(self.0.cuda.stream(), stream))
    }
}

/// A bare buffer comes without a token, so the host waits for the buffer's last uses on entry, and cudarc waits for
/// `stream` at the end: always correct, and slow. `Cuda::read` and `Cuda::write` order on the device instead.
fn wait_on_host<'s>(block: &BlockRef, access: Access, stream: &'s CudaStream) -> SyncOnDrop<'s> {
    refuse(block, access);
    let limit = Duration::from_secs(600);
    block.hazards.wait_host(&block.handle, "cudarc", access, limit).expect("the buffer's last uses failed");
    SyncOnDrop::Sync(Some(stream))
}

/// The use by cudarc is not noted anywhere, and a launch of a graph needs no borrow. While the caller's borrow lasts, a
/// new graph can name the memory only to read it, and the caller also reads it then.
fn refuse(block: &BlockRef, access: Access) {
    assert!(!block.hazards.is_lent(access), "another process has this memory");
    assert!(
        !block.is_in_graph(),
        "a graph names this buffer, so a launch could come in between: pass `dev.cuda()?.read(&x)` or `write(&mut x)` \
         to cudarc in place of the buffer"
    );
}

/// cudarc's trait gives no way to return an error.
fn default_stream(block: &BlockRef) -> &Arc<CudaStream> {
    block.handle.cudarc_stream(|| {
        let gpu = block.handle.driver.as_any().downcast_ref::<CudaGpu>();
        let gpu = gpu.expect("a buffer of a software GPU was given to cudarc");
        gpu.cudarc_context().expect("cudarc could not open the device").default_stream()
    })
}

macro_rules! bare {
    ($($buffer:ty)+) => {$(
        impl<T: DeviceCopy> DeviceSlice<T> for $buffer {
            fn len(&self) -> usize {
                self.len
            }
            /// A stream of the buffer's device.
            ///
            /// # Panics
            /// On a software GPU.
            fn stream(&self) -> &Arc<CudaStream> {
                default_stream(self.view().block)
            }
        }
        impl<T: DeviceCopy> DevicePtr<T> for $buffer {
            /// # Panics
            /// If a graph names the memory: use [`Cuda::read`]. If its last uses have failed.
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                let view = self.view();
                (view.address(), wait_on_host(view.block, Access::Read, stream))
            }
        }
    )+};
}
bare! { DeviceBuffer<T> DeviceView<'_, T> DeviceViewMut<'_, T> }

macro_rules! bare_mut {
    ($($buffer:ty)+) => {$(
        impl<T: DeviceCopy> DevicePtrMut<T> for $buffer {
            /// # Panics
            /// If a graph names the memory: use [`Cuda::write`]. If its last uses have failed.
            fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                let view = self.view();
                (view.address(), wait_on_host(view.block, Access::Write, stream))
            }
        }
    )+};
}
bare_mut! { DeviceBuffer<T> DeviceViewMut<'_, T> }

macro_rules! argument {
    ($([$($lifetime:lifetime)*] $arg:ty => $field:expr;)+) => {$(
        // SAFETY: the address belongs to the buffer, which is borrowed for the arguments' lifetime; cudarc copies it at
        // the launch. `LaunchArgs` hides its stream, so the launch cannot be ordered here. But `launch` is unsafe: the
        // caller promises to launch on `dev.cuda()?.stream()`, with the buffer ordered by `read` or `write`.
        unsafe impl<'a, 'b: 'a, $($lifetime: 'b,)* T: DeviceCopy> PushKernelArg<$arg> for LaunchArgs<'a> {
            #[inline(always)]
            fn arg(&mut self, buffer: $arg) -> &mut Self {
                let address: &'b u64 = $field(buffer);
                self.arg(address)
            }
        }
    )+};
}
argument! {
    [] &'b DeviceBuffer<T> => |b: &'b DeviceBuffer<T>| &b.block.address;
    [] &'b mut DeviceBuffer<T> => |b: &'b mut DeviceBuffer<T>| &b.block.address;
    ['c] &'b DeviceView<'c, T> => |b: &'b DeviceView<'c, T>| &b.address;
    ['c] &'b mut DeviceViewMut<'c, T> => |b: &'b mut DeviceViewMut<'c, T>| &b.address;
}

#[cfg(test)]
#[path = "../tests/unit/interop_tests.rs"]
mod tests;
