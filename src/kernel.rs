//! Kernels: device code with a typed signature, and its host kernel for software GPUs.
//!
//! A kernel's signature is its access declaration: `&[T]` is read, `&mut [T]` is read and written, anything else is
//! passed by value. Wrong argument types do not compile.

pub(crate) mod builtin;
pub(crate) mod real;

use crate::{
    DeviceCopy,
    driver::{HostArg, HostKernel, KernelArg, LaunchDims, ModuleImage, ValueBytes, host::again},
    memory::{AsView, AsViewMut, DeviceBuffer, DeviceView, DeviceViewMut, PeerView, block::BlockRef, hazard::Access},
};
use smallvec::SmallVec;
use std::{marker::PhantomData, ops::Range, slice, task::Poll};

/// Device code, loaded eagerly on every device when a pool is built with it
/// ([`Builder::module`](crate::Builder::module)). Each pool loads its own, so a module's variables are the pool's.
///
/// ```
/// # use gpu_pool::Module;
/// static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
/// ```
#[derive(Debug)]
pub struct Module {
    pub(crate) image: ModuleImage,
}

impl Module {
    /// PTX text, as from `nvcc -ptx`. The driver compiles it for the GPU at hand (and caches that).
    pub const fn ptx(ptx: &'static str) -> Self {
        Module { image: ModuleImage { ptx: Some(ptx), cubins: &[], source: None, shared: false } }
    }

    /// Adds compiled images: `(10 * major + minor, cubin)`. One that fits the GPU is preferred to the PTX.
    pub const fn with_cubins(self, cubins: &'static [(u32, &'static [u8])]) -> Self {
        Module { image: ModuleImage { cubins, ..self.image } }
    }

    /// One of the crate's own, which have no variables: all pools of a process may have it in common.
    pub(crate) const fn shared(self) -> Self {
        Module { image: ModuleImage { shared: true, ..self.image } }
    }

    /// CUDA C++ source, compiled by NVRTC when it is loaded. Kernels must be `extern "C"`.
    #[cfg(feature = "nvrtc")]
    pub const fn cuda(source: &'static str) -> Self {
        Module { image: ModuleImage { ptx: None, cubins: &[], source: Some(source), shared: false } }
    }
}

/// One parameter in a kernel's signature: `&[T]`, `&mut [T]`, or a [`Scalar`].
///
/// In a `static` the elided lifetimes are `'static`; here they are only names for "shared" and "exclusive".
///
/// # Safety
/// `Host` must be what the device function expects at this place, and the access must not promise less than it does.
pub unsafe trait Param: 'static {
    /// What the host kernel gets.
    type Host<'a>;

    #[doc(hidden)]
    unsafe fn host<'a>(arg: &HostArg) -> Self::Host<'a>;
}

// SAFETY: a shared slice is read only.
unsafe impl<T: DeviceCopy> Param for &'static [T] {
    type Host<'a> = &'a [T];

    unsafe fn host<'a>(arg: &HostArg) -> &'a [T] {
        let HostArg::Slice { ptr, bytes, .. } = *arg else { unreachable!("packed by `Arg`") };
        // SAFETY: the driver hands out memory that nobody writes while the kernel runs; `Arg` packed `bytes` as a whole
        // number of `T`, which is Pod, and buffers are aligned to 256 bytes.
        unsafe { slice::from_raw_parts(ptr.cast(), bytes / size_of::<T>().max(1)) }
    }
}

// SAFETY: an exclusive slice may be written.
unsafe impl<T: DeviceCopy> Param for &'static mut [T] {
    type Host<'a> = &'a mut [T];

    unsafe fn host<'a>(arg: &HostArg) -> &'a mut [T] {
        let HostArg::Slice { ptr, bytes, .. } = *arg else { unreachable!("packed by `Arg`") };
        // SAFETY: as above, and nobody else touches it while the kernel runs.
        unsafe { slice::from_raw_parts_mut(ptr.cast(), bytes / size_of::<T>().max(1)) }
    }
}

/// A kernel argument passed by value, at most 64 bytes. Implement it for your `#[repr(C)]` parameter structs.
///
/// # Safety
/// The device function expects exactly this size and layout. A device address hidden inside is not seen by the library:
/// what the kernel does through it is not ordered.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a kernel parameter",
    note = "kernel parameters are `&[T]`, `&mut [T]` and numbers; implement `Scalar` for your `#[repr(C)]` parameter struct"
)]
pub unsafe trait Scalar: DeviceCopy {}

macro_rules! scalar {
    ($($t:ty)*) => {$(
        // SAFETY: a primitive type has the layout of its C counterpart.
        unsafe impl Scalar for $t {}
    )*};
}
scalar! { f32 f64 i8 u8 i16 u16 i32 u32 i64 u64 usize half::f16 half::bf16 }

// SAFETY: a value is not memory.
unsafe impl<S: Scalar> Param for S {
    type Host<'a> = S;

    unsafe fn host<'a>(arg: &HostArg) -> Self::Host<'a> {
        let HostArg::Value(bytes) = arg else { unreachable!("packed by `Arg`") };
        bytemuck::pod_read_unaligned(bytes.as_bytes())
    }
}

/// An argument with what it touches.
#[doc(hidden)]
pub struct Packed {
    pub(crate) arg: KernelArg,
    pub(crate) touch: Option<Touch>,
}

/// The memory that an argument names.
#[doc(hidden)]
pub struct Touch {
    pub(crate) block: BlockRef,
    pub(crate) bytes: Range<usize>,
    pub(crate) access: Access,
    /// Named through `peer()`, so it may be on another device.
    pub(crate) foreign: bool,
}

/// A value that may be given for the kernel parameter `P`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be given for the kernel parameter `{P}`",
    label = "expected {P}",
    note = "`&[T]` takes `&buffer`, `buffer.slice(..)` or `buffer.peer()`; `&mut [T]` takes `&mut buffer` or \
            `buffer.slice_mut(..)`; scalars must have exactly the parameter's type"
)]
pub trait Arg<P> {
    #[doc(hidden)]
    fn pack(self) -> Packed;
}

impl<S: Scalar> Arg<S> for S {
    fn pack(self) -> Packed {
        const { assert!(size_of::<S>() <= ValueBytes::MAX, "a by-value kernel argument has at most 64 bytes") };
        Packed { arg: KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&self))), touch: None }
    }
}

fn pack<T: DeviceCopy>(view: DeviceView<'_, T>, access: Access, foreign: bool) -> Packed {
    let bytes = view.bytes();
    let write = access == Access::Write;
    let arg = KernelArg::Slice { address: view.address(), bytes: bytes.len(), write };
    Packed { arg, touch: Some(Touch { block: view.block.clone(), bytes, access, foreign }) }
}

impl<T: DeviceCopy> Arg<&'static [T]> for &DeviceBuffer<T> {
    fn pack(self) -> Packed {
        pack(self.view(), Access::Read, false)
    }
}
impl<T: DeviceCopy> Arg<&'static [T]> for DeviceView<'_, T> {
    fn pack(self) -> Packed {
        pack(self, Access::Read, false)
    }
}
impl<T: DeviceCopy> Arg<&'static [T]> for &DeviceView<'_, T> {
    fn pack(self) -> Packed {
        pack(*self, Access::Read, false)
    }
}
impl<T: DeviceCopy> Arg<&'static [T]> for &DeviceViewMut<'_, T> {
    fn pack(self) -> Packed {
        pack(self.view(), Access::Read, false)
    }
}
impl<T: DeviceCopy> Arg<&'static [T]> for PeerView<'_, T> {
    fn pack(self) -> Packed {
        pack(self.0, Access::Read, true)
    }
}
impl<T: DeviceCopy> Arg<&'static mut [T]> for &mut DeviceBuffer<T> {
    fn pack(self) -> Packed {
        pack(self.view(), Access::Write, false)
    }
}
impl<T: DeviceCopy> Arg<&'static mut [T]> for DeviceViewMut<'_, T> {
    fn pack(self) -> Packed {
        pack(self.view(), Access::Write, false)
    }
}
impl<T: DeviceCopy> Arg<&'static mut [T]> for &mut DeviceViewMut<'_, T> {
    fn pack(self) -> Packed {
        pack((*self).view_mut().view(), Access::Write, false)
    }
}

/// A kernel's parameters: a tuple of up to twelve [`Param`]s.
pub trait Signature: 'static {}

/// A function, or closure without captures, that computes a whole launch on a software GPU.
pub trait HostFn<S: Signature>: Copy + Send + Sync + 'static {
    #[doc(hidden)]
    unsafe fn call(self, dims: LaunchDims, args: &[HostArg]);
}

/// As [`HostFn`], for one attempt of a kernel that may have to wait: `Pending` asks for another.
pub trait HostAttempt<S: Signature>: Copy + Send + Sync + 'static {
    #[doc(hidden)]
    unsafe fn call(self, dims: LaunchDims, args: &[HostArg]) -> Poll<()>;
}

#[doc(hidden)]
pub type PackedArgs = SmallVec<[Packed; 8]>;

/// A tuple of arguments that fits the signature `S`.
#[diagnostic::on_unimplemented(
    message = "the arguments `{Self}` do not fit the kernel's parameters `{S}`",
    note = "one argument is written `(x,)`"
)]
pub trait Args<S: Signature> {
    #[doc(hidden)]
    fn pack(self) -> PackedArgs;
}

macro_rules! tuples {
    ($( ($($P:ident $A:ident $i:tt),+) )*) => {$(
        impl<$($P: Param),+> Signature for ($($P,)+) {}

        impl<Func, $($P: Param),+> HostFn<($($P,)+)> for Func
        where
            Func: for<'a> Fn(LaunchDims, $($P::Host<'a>),+) + Copy + Send + Sync + 'static,
        {
            unsafe fn call(self, dims: LaunchDims, args: &[HostArg]) {
                // SAFETY: the caller passes the arguments that `Args` packed for this very signature.
                self(dims, $(unsafe { $P::host(&args[$i]) }),+)
            }
        }

        impl<Func, $($P: Param),+> HostAttempt<($($P,)+)> for Func
        where
            Func: for<'a> Fn(LaunchDims, $($P::Host<'a>),+) -> Poll<()> + Copy + Send + Sync + 'static,
        {
            unsafe fn call(self, dims: LaunchDims, args: &[HostArg]) -> Poll<()> {
                // SAFETY: the caller passes the arguments that `Args` packed for this very signature.
                self(dims, $(unsafe { $P::host(&args[$i]) }),+)
            }
        }

        impl<$($P: Param, $A: Arg<$P>),+> Args<($($P,)+)> for ($($A,)+) {
            fn pack(self) -> PackedArgs {
                let mut all = PackedArgs::new();
                $(all.push(self.$i.pack());)+
                all
            }
        }
    )*};
}
tuples! {
    (P0 A0 0)
    (P0 A0 0, P1 A1 1)
    (P0 A0 0, P1 A1 1, P2 A2 2)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9, P10 A10 10)
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9, P10 A10 10, P11 A11 11)
}

/// A value of a type without bytes.
///
/// # Safety
/// The type is inhabited: a value of it was given to whoever asks.
unsafe fn conjure<H: Copy>() -> H {
    const { assert!(size_of::<H>() == 0, "a host kernel captures nothing") };
    #[allow(clippy::uninit_assumed_init)] // which cannot see that there are no bytes
    // SAFETY: `H` has no bytes, is `Copy`, and inhabited.
    unsafe {
        std::mem::MaybeUninit::uninit().assume_init()
    }
}

/// Makes a plain function pointer of a host function. `H` is zero-sized (a function item or a closure without
/// captures), so a value of it can be had from nothing; that keeps `Kernel::new` usable in a `static`.
unsafe fn trampoline<S: Signature, H: HostFn<S>>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: a value was given to `Kernel::new`.
    let host: H = unsafe { conjure() };
    // SAFETY: passed on from the caller.
    unsafe { host.call(dims, args) }
}

/// The same for [`HostAttempt`].
unsafe fn attempt<S: Signature, H: HostAttempt<S>>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: a value was given to `Kernel::resumable`.
    let host: H = unsafe { conjure() };
    // SAFETY: passed on from the caller.
    if unsafe { host.call(dims, args) }.is_pending() {
        again();
    }
}

/// A device function with its types, and a Rust function over the whole launch for software GPUs. Usually made by
/// [`kernel!`](crate::kernel).
pub struct Kernel<S: Signature> {
    pub(crate) module: &'static Module,
    pub(crate) name: &'static str,
    pub(crate) host: Option<HostKernel>,
    signature: PhantomData<fn(S)>,
}

impl<S: Signature> Kernel<S> {
    /// The function `name` of `module`, with its host kernel.
    pub const fn new<H: HostFn<S>>(module: &'static Module, name: &'static str, host: H) -> Self {
        let _ = host;
        Kernel { module, name, host: Some(trampoline::<S, H>), signature: PhantomData }
    }

    /// As [`new`](Self::new), for a kernel that waits on the GPU for what others write: one call of the host kernel makes one
    /// attempt and says whether the kernel has finished. Between attempts it holds no thread and no memory of the
    /// software GPU, so what it waits for can happen; see [`host::again`](crate::driver::host::again).
    ///
    /// The word that it waits for is an argument like any other: the library orders this launch after earlier uses of
    /// that buffer, and later ones after it. So it must be written past the library's back, as it is on a GPU:
    /// [`Device::unordered`](crate::Device::unordered).
    ///
    /// A [checker](crate::Builder::check) cannot tell such a word from other memory: to it, the spinning and the
    /// writing are a race. Programs with spinning kernels run with [`Check::Off`](crate::Check::Off).
    pub const fn resumable<H: HostAttempt<S>>(module: &'static Module, name: &'static str, host: H) -> Self {
        let _ = host;
        Kernel { module, name, host: Some(attempt::<S, H>), signature: PhantomData }
    }

    /// Without a host kernel: on software GPUs a launch is [`Error::KernelNotFound`](crate::Error::KernelNotFound).
    pub const fn device_only(module: &'static Module, name: &'static str) -> Self {
        Kernel { module, name, host: None, signature: PhantomData }
    }

    /// The device function's name.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// Declares kernels: `static NAME: "symbol" in MODULE, fn(parameters) |dims| { the host kernel }`, or with `;` instead of
/// the host kernel for GPUs only.
///
/// Parameters are `&[T]`, `&mut [T]` and by-value [`Scalar`](crate::Scalar)s, in the order of the C parameters. A slice
/// becomes a bare pointer there, so pass lengths yourself. The host kernel runs once for the whole launch, with slices as long
/// as what was passed; `dims` is the launch's [`LaunchDims`](crate::LaunchDims). A panic in the host kernel loses the software
/// device, as a fault does on a GPU. One `kernel!` may declare several kernels.
///
/// ```
/// use gpu_pool::{GpuPool, LaunchDims, Module, kernel};
///
/// static MODULE: Module =
///     Module::ptx(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/elementwise.ptx")));
/// kernel! {
///     /// y += a * x
///     static SAXPY: "axpy_f32" in MODULE, fn(x: &[f32], y: &mut [f32], n: u64, a: f32) |_| {
///         for (y, x) in y.iter_mut().zip(x).take(n as usize) { *y += a * x }
///     }
/// }
///
/// let pool = GpuPool::builder().host(2).module(&MODULE).build()?;
/// let out = pool.run(|dev, shard| {
///     let x = dev.upload(&[1.0f32, 2.0, 3.0])?;
///     let mut y = dev.zeros::<f32>(3)?;
///     // SAFETY: the kernel fits its signature and touches only the first n elements of each.
///     unsafe { dev.launch(&SAXPY, LaunchDims::cover(3), (&x, &mut y, 3u64, shard.index() as f32))? };
///     dev.download(&y)
/// })?;
/// assert_eq!(out, [[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// An argument that is a `&mut` already moves into the tuple: [`Device::launch`](crate::Device::launch) says how to
/// keep it. A wrong argument does not compile:
/// ```compile_fail,E0277
/// # use gpu_pool::*;
/// static MODULE: Module = Module::ptx("");
/// kernel! { static K: "k" in MODULE, fn(x: &[f32], n: u32); }
/// # fn f(dev: &Device, x: &DeviceBuffer<f64>) {
/// unsafe { dev.launch(&K, LaunchDims::cover(1), (x, 1u32)) }; // f64 for f32
/// # }
/// ```
#[macro_export]
macro_rules! kernel {
    () => {};
    ($(#[$m:meta])* $v:vis static $name:ident: $sym:literal in $module:path,
     fn($($p:ident: $t:ty),+ $(,)?) |$dims:pat_param| $body:block $($rest:tt)*) => {
        $(#[$m])* $v static $name: $crate::Kernel<($($t,)+)> = {
            #[allow(clippy::too_many_arguments)]
            fn host($dims: $crate::LaunchDims, $($p: $t),+) $body
            $crate::Kernel::new(&$module, $sym, host)
        };
        $crate::kernel! { $($rest)* }
    };
    ($(#[$m:meta])* $v:vis static $name:ident: $sym:literal in $module:path,
     fn($($p:ident: $t:ty),+ $(,)?); $($rest:tt)*) => {
        $(#[$m])* $v static $name: $crate::Kernel<($($t,)+)> = $crate::Kernel::device_only(&$module, $sym);
        $crate::kernel! { $($rest)* }
    };
}
