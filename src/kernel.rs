//! Kernels: device code with a typed signature, and its host kernel for software GPUs. Invariant: arguments that do not
//! fit the signature do not compile.

pub(crate) mod builtin;
pub(crate) mod real;

#[cfg(feature = "blas")]
pub use crate::ops::GemmOutput;
pub use builtin::{CastTo, Float};

use crate::{
    DeviceCopy,
    driver::{HostArg, HostKernel, KernelArg, LaunchDims, ValueBytes, host::again, module::Module},
    memory::{Access, AsView, AsViewMut, DeviceBuffer, DeviceView, DeviceViewMut, PeerView},
    token::op::Touch,
};
use smallvec::SmallVec;
use std::{marker::PhantomData, slice, task::Poll};

/// One parameter in a kernel's signature: `&[T]`, `&mut [T]`, or a [`Scalar`].
///
/// In a `static` the elided lifetimes are `'static`. Here they only stand for "shared" and "exclusive".
///
/// # Safety
/// `Host` must be the type that the device function expects at this position. If the device function writes through the
/// parameter, the parameter must be exclusive.
pub unsafe trait Param: 'static {
    /// The type of the host kernel's argument.
    type Host<'a>;

    #[doc(hidden)]
    unsafe fn host<'a>(arg: &HostArg) -> Self::Host<'a>;
}

// SAFETY: a shared slice is read only.
unsafe impl<T: DeviceCopy> Param for &'static [T] {
    type Host<'a> = &'a [T];

    unsafe fn host<'a>(arg: &HostArg) -> &'a [T] {
        let HostArg::Slice { ptr, bytes, .. } = *arg else { unreachable!("packed by `Arg`") };
        // SAFETY: the driver passes memory that is not written while the kernel runs. `Arg` has packed a whole number
        // of `T`, which is Pod, and buffers are aligned to 256 bytes.
        unsafe { slice::from_raw_parts(ptr.cast(), bytes / size_of::<T>().max(1)) }
    }
}

// SAFETY: an exclusive slice may be written.
unsafe impl<T: DeviceCopy> Param for &'static mut [T] {
    type Host<'a> = &'a mut [T];

    unsafe fn host<'a>(arg: &HostArg) -> &'a mut [T] {
        let HostArg::Slice { ptr, bytes, .. } = *arg else { unreachable!("packed by `Arg`") };
        // SAFETY: as above, and no other work accesses the memory while the kernel runs.
        unsafe { slice::from_raw_parts_mut(ptr.cast(), bytes / size_of::<T>().max(1)) }
    }
}

/// A kernel argument passed by value, at most 64 bytes. Implement it for your `#[repr(C)]` parameter structs.
///
/// # Safety
/// The device function expects exactly this size and layout. The library does not see a device address inside the
/// value, so it does not order accesses through that address.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a kernel parameter",
    note = "kernel parameters are `&[T]`, `&mut [T]` and numbers; implement `Scalar` for your `#[repr(C)]` parameter \
            struct"
)]
pub unsafe trait Scalar: DeviceCopy {}

macro_rules! scalar {
    ($($t:ty)*) => {$(
        // SAFETY: a primitive type has the layout of the corresponding C type.
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

#[doc(hidden)]
pub struct Packed {
    pub(crate) arg: KernelArg,
    pub(crate) touch: Option<Touch>,
}

/// A value that may be passed for the kernel parameter `P`.
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

macro_rules! buffer_args {
    ($($Given:ty as $Param:ty: |$this:ident| $view:expr, $access:ident, $foreign:literal;)+) => {$(
        impl<T: DeviceCopy> Arg<$Param> for $Given {
            fn pack($this) -> Packed {
                pack($view, Access::$access, $foreign)
            }
        }
    )+};
}
buffer_args! {
    &DeviceBuffer<T> as &'static [T]: |self| self.view(), Read, false;
    &std::sync::Arc<DeviceBuffer<T>> as &'static [T]: |self| self.view(), Read, false;
    DeviceView<'_, T> as &'static [T]: |self| self, Read, false;
    &DeviceView<'_, T> as &'static [T]: |self| *self, Read, false;
    &DeviceViewMut<'_, T> as &'static [T]: |self| self.view(), Read, false;
    PeerView<'_, T> as &'static [T]: |self| self.0, Read, true;
    &mut DeviceBuffer<T> as &'static mut [T]: |self| self.view(), Write, false;
    DeviceViewMut<'_, T> as &'static mut [T]: |self| self.view(), Write, false;
    &mut DeviceViewMut<'_, T> as &'static mut [T]: |self| (*self).view_mut().view(), Write, false;
}

/// A kernel's parameters: a tuple of up to twelve [`Param`]s.
pub trait Signature: 'static {}

/// A function, or closure without captures, that computes a whole launch on a software GPU; or, if it returns a `Poll`,
/// that makes one attempt of a kernel that may have to wait. `Pending` asks for another attempt.
pub trait HostFn<S: Signature, R = ()>: Copy + Send + Sync + 'static {
    #[doc(hidden)]
    unsafe fn call(self, dims: LaunchDims, args: &[HostArg]) -> R;
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

macro_rules! tuple {
    ($(($P:ident $A:ident $i:tt))+) => {
        impl<$($P: Param),+> Signature for ($($P,)+) {}

        impl<Func, R, $($P: Param),+> HostFn<($($P,)+), R> for Func
        where
            Func: for<'a> Fn(LaunchDims, $($P::Host<'a>),+) -> R + Copy + Send + Sync + 'static,
        {
            unsafe fn call(self, dims: LaunchDims, args: &[HostArg]) -> R {
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
    };
}
each_start! { tuple []
    (P0 A0 0) (P1 A1 1) (P2 A2 2) (P3 A3 3) (P4 A4 4) (P5 A5 5) (P6 A6 6) (P7 A7 7) (P8 A8 8) (P9 A9 9) (P10 A10 10)
    (P11 A11 11)
}

/// A value of a type without bytes.
///
/// # Safety
/// The type is inhabited: the caller's caller has had a value of it.
unsafe fn conjure<H: Copy>() -> H {
    const { assert!(size_of::<H>() == 0, "a host kernel captures nothing") };
    #[allow(clippy::uninit_assumed_init)] // clippy does not see that the type has no bytes
    // SAFETY: `H` has no bytes, is `Copy`, and inhabited.
    unsafe {
        std::mem::MaybeUninit::uninit().assume_init()
    }
}

/// A plain function that calls a host function. `H` is zero-sized (a function item or a closure without captures), so a
/// value of it needs no bytes. That keeps `Kernel::new` usable in a `static`.
unsafe fn trampoline<S: Signature, H: HostFn<S>>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: `Kernel::new` was called with a value of `H`.
    let host: H = unsafe { conjure() };
    // SAFETY: the caller's promise.
    unsafe { host.call(dims, args) }
}

unsafe fn attempt<S: Signature, H: HostFn<S, Poll<()>>>(dims: LaunchDims, args: &[HostArg]) {
    // SAFETY: `Kernel::resumable` was called with a value of `H`.
    let host: H = unsafe { conjure() };
    // SAFETY: the caller's promise.
    if unsafe { host.call(dims, args) }.is_pending() {
        again();
    }
}

/// A device function with its parameter types, and a Rust function that computes a whole launch on a software GPU.
/// Usually made by [`kernel!`](crate::kernel!).
pub struct Kernel<S: Signature> {
    pub(crate) module: &'static Module,
    pub(crate) name: &'static str,
    pub(crate) host: Option<HostKernel>,
    signature: PhantomData<fn(S)>,
}

debug_as!(Kernel<S> [S: Signature], |self| "Kernel({})", self.name);

impl<S: Signature> Kernel<S> {
    /// The function `name` of `module`, with its host kernel.
    pub const fn new<H: HostFn<S>>(module: &'static Module, name: &'static str, host: H) -> Self {
        let _ = host;
        Kernel { module, name, host: Some(trampoline::<S, H>), signature: PhantomData }
    }

    /// As [`new`](Self::new), for a kernel that waits on the GPU for a value that other work writes. One call of the
    /// host kernel makes one attempt, and returns whether the kernel has finished. Between attempts the kernel holds no
    /// thread and no memory of the software GPU, so the other work can run: see
    /// [`host::again`](crate::driver::host::again).
    ///
    /// The word for which the kernel waits is an ordinary argument: the library orders this launch after earlier uses
    /// of that buffer, and later uses after this launch. So other work must write the word without the library's order,
    /// as on a GPU: [`Device::unordered`](crate::Device::unordered).
    ///
    /// A checker cannot tell such a word from other memory, so it reports the wait and the
    /// write as a race. Run programs with spinning kernels with `Check::Off`.
    pub const fn resumable<H: HostFn<S, Poll<()>>>(module: &'static Module, name: &'static str, host: H) -> Self {
        let _ = host;
        Kernel { module, name, host: Some(attempt::<S, H>), signature: PhantomData }
    }

    /// A kernel without a host kernel. On software GPUs a launch of it is
    /// [`Error::KernelNotFound`](crate::Error::KernelNotFound).
    pub const fn device_only(module: &'static Module, name: &'static str) -> Self {
        Kernel { module, name, host: None, signature: PhantomData }
    }

    /// The device function's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The module of the device function.
    pub fn module(&self) -> &'static Module {
        self.module
    }
}

/// Declares kernels: `static NAME: "symbol" in MODULE, fn(parameters) |dims| { the host kernel }`, or with `;` instead
/// of the host kernel for GPUs only.
///
/// Parameters are `&[T]`, `&mut [T]` and by-value [`Scalar`]s, in the order of the C parameters. In C a slice becomes a
/// plain pointer, so pass its length as a parameter of its own. The host kernel runs once for the whole launch; its
/// slices are as long as the arguments, and `dims` is the launch's [`LaunchDims`]. After a panic in the host kernel the
/// software device is lost, as a GPU is after a fault. One `kernel!` may declare several kernels.
///
/// The page "Your own kernels, and cudarc" of the guide has an example.
///
/// A variable that is a `&mut` moves into the tuple; [`Device::launch`](crate::Device::launch) says how to keep it. A
/// wrong argument does not compile:
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
