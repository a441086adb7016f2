//! Default forwards for layers: drivers that wrap another driver and do something around its calls.
//!
//! The layers of `gpu-pool-lab` use the macro `forward!` in their `impl Driver`; `cuda` uses it to forward to its own
//! methods. It knows the types of all calls (which must be in scope there), so a layer names only arguments.
//!
//! Invariant: a layer cannot miss a call: none of the trait's has a default body.

/// Methods of an `impl Driver`. `name(arguments);` forwards a call. `name(arguments) => expression;` wraps it: the
/// expression uses `call`, a closure that makes the forwarded call once. An expression without `call` replaces the
/// call. `|layer, call| layer.inner;` names the layer, the closure, and the wrapped driver.
#[doc(hidden)]
#[macro_export]
macro_rules! __forward {
    (
        |$layer:ident, $call:ident| $inner:expr;
        $($(#[$attr:meta])* $name:ident($($arg:ident),*) $(=> $around:expr)?;)*
    ) => {
        $($crate::__forward! { @ $name $name [$(#[$attr])*] $layer $call ($inner) [$($arg)*] [$($around)?] })*
    };

    // The types of the arguments and of the result, as in the trait.
    (@ info $($r:tt)*) => { $crate::__forward! { safe [] &DeviceInfo; $($r)* } };
    (@ as_any $($r:tt)*) => { $crate::__forward! { safe [] &dyn Any; $($r)* } };
    (@ bind $($r:tt)*) => { $crate::__forward! { safe [] DriverResult; $($r)* } };
    (@ memory_info $($r:tt)*) => { $crate::__forward! { safe [] DriverResult<(u64, u64)>; $($r)* } };
    (@ mem_alloc $($r:tt)*) => { $crate::__forward! { safe [usize] DriverResult<Address>; $($r)* } };
    (@ mem_free $($r:tt)*) => { $crate::__forward! { unsafe [Address] DriverResult; $($r)* } };
    (@ host_alloc $($r:tt)*) => { $crate::__forward! { safe [usize] DriverResult<*mut u8>; $($r)* } };
    (@ host_free $($r:tt)*) => { $crate::__forward! { unsafe [*mut u8] DriverResult; $($r)* } };
    (@ managed_alloc $($r:tt)*) => { $crate::__forward! { safe [usize] DriverResult<*mut u8>; $($r)* } };
    (@ managed_free $($r:tt)*) => { $crate::__forward! { unsafe [*mut u8] DriverResult; $($r)* } };
    (@ adopt $($r:tt)*) => { $crate::__forward! { unsafe [Address, usize] DriverResult<Address>; $($r)* } };
    (@ disown $($r:tt)*) => { $crate::__forward! { unsafe [Address] DriverResult; $($r)* } };
    (@ vm_granularity $($r:tt)*) => { $crate::__forward! { safe [] Option<usize>; $($r)* } };
    (@ vm_reserve $($r:tt)*) => { $crate::__forward! { safe [u64] DriverResult<Address>; $($r)* } };
    (@ vm_release $($r:tt)*) => { $crate::__forward! { unsafe [Address, u64] DriverResult; $($r)* } };
    (@ vm_map $($r:tt)*) => { $crate::__forward! { unsafe [Address, usize] DriverResult; $($r)* } };
    (@ vm_unmap $($r:tt)*) => { $crate::__forward! { unsafe [Address, usize] DriverResult; $($r)* } };
    (@ vm_move $($r:tt)*) => { $crate::__forward! { unsafe [Address, Address, usize] DriverResult; $($r)* } };
    (@ vm_export $($r:tt)*) => { $crate::__forward! { unsafe [Address, usize] DriverResult<OwnedFd>; $($r)* } };
    (@ vm_import $($r:tt)*) => { $crate::__forward! { unsafe [Address, usize, BorrowedFd<'_>] DriverResult; $($r)* } };
    (@ stream_create $($r:tt)*) => { $crate::__forward! { safe [i32] DriverResult<RawStream>; $($r)* } };
    (@ stream_adopt $($r:tt)*) => { $crate::__forward! { unsafe [RawStream] DriverResult; $($r)* } };
    (@ stream_destroy $($r:tt)*) => { $crate::__forward! { unsafe [RawStream] DriverResult; $($r)* } };
    (@ stream_query $($r:tt)*) => { $crate::__forward! { safe [RawStream] DriverResult<bool>; $($r)* } };
    (@ stream_wait_idle $($r:tt)*) => { $crate::__forward! { safe [RawStream, Duration] DriverResult<bool>; $($r)* } };
    (@ stream_wait_event $($r:tt)*) => { $crate::__forward! { safe [RawStream, RawEvent] DriverResult; $($r)* } };
    (@ event_create $($r:tt)*) => { $crate::__forward! { safe [bool] DriverResult<RawEvent>; $($r)* } };
    (@ event_destroy $($r:tt)*) => { $crate::__forward! { unsafe [RawEvent] DriverResult; $($r)* } };
    (@ event_record $($r:tt)*) => { $crate::__forward! { safe [RawEvent, RawStream] DriverResult; $($r)* } };
    (@ event_query $($r:tt)*) => { $crate::__forward! { safe [RawEvent] DriverResult<bool>; $($r)* } };
    (@ event_wait $($r:tt)*) => { $crate::__forward! { safe [RawEvent, Duration] DriverResult<bool>; $($r)* } };
    (@ event_elapsed $($r:tt)*) => { $crate::__forward! { safe [RawEvent, RawEvent] DriverResult<Duration>; $($r)* } };
    (@ copy_to_device $($r:tt)*) => {
        $crate::__forward! { unsafe [Address, *const u8, usize, RawStream] DriverResult; $($r)* }
    };
    (@ copy_to_host $($r:tt)*) => {
        $crate::__forward! { unsafe [*mut u8, Address, usize, RawStream] DriverResult; $($r)* }
    };
    (@ copy_within $($r:tt)*) => {
        $crate::__forward! { unsafe [Address, Address, usize, RawStream] DriverResult; $($r)* }
    };
    (@ copy_peer $($r:tt)*) => {
        $crate::__forward! {
            unsafe [Address, &dyn Driver, Address, &dyn Driver, usize, RawStream] DriverResult; $($r)*
        }
    };
    (@ fill_u8 $($r:tt)*) => { $crate::__forward! { unsafe [Address, u8, usize, RawStream] DriverResult; $($r)* } };
    (@ fill_u32 $($r:tt)*) => { $crate::__forward! { unsafe [Address, u32, usize, RawStream] DriverResult; $($r)* } };
    (@ can_access_peer $($r:tt)*) => { $crate::__forward! { safe [&dyn Driver] DriverResult<bool>; $($r)* } };
    (@ enable_peer $($r:tt)*) => { $crate::__forward! { safe [&dyn Driver] DriverResult; $($r)* } };
    (@ disable_peer $($r:tt)*) => { $crate::__forward! { safe [&dyn Driver] DriverResult; $($r)* } };
    (@ module_load $($r:tt)*) => { $crate::__forward! { safe [&ModuleImage] DriverResult<RawModule>; $($r)* } };
    (@ module_unload $($r:tt)*) => { $crate::__forward! { unsafe [RawModule] DriverResult; $($r)* } };
    (@ function $($r:tt)*) => { $crate::__forward! { safe [RawModule, &str] DriverResult<RawFunction>; $($r)* } };
    (@ launch $($r:tt)*) => { $crate::__forward! { unsafe [&Launch<'_>, RawStream] DriverResult; $($r)* } };
    (@ launch_host $($r:tt)*) => {
        $crate::__forward! { safe [RawStream, Box<dyn FnOnce() + Send>] DriverResult; $($r)* }
    };
    (@ gemm $($r:tt)*) => {
        $crate::__if_blas! { $crate::__forward! { unsafe [&Gemm, RawStream] DriverResult; $($r)* } }
    };
    (@ capture_begin $($r:tt)*) => { $crate::__forward! { safe [RawStream] DriverResult; $($r)* } };
    (@ capture_end $($r:tt)*) => { $crate::__forward! { safe [RawStream] DriverResult<RawGraph>; $($r)* } };
    (@ graph_launch $($r:tt)*) => { $crate::__forward! { unsafe [RawGraph, RawStream] DriverResult; $($r)* } };
    (@ graph_destroy $($r:tt)*) => { $crate::__forward! { unsafe [RawGraph] DriverResult; $($r)* } };
    (@ write_value $($r:tt)*) => { $crate::__forward! { unsafe [Address, u64, RawStream] DriverResult; $($r)* } };
    (@ wait_value $($r:tt)*) => { $crate::__forward! { unsafe [Address, u64, RawStream] DriverResult; $($r)* } };
    (@ poll_value $($r:tt)*) => { $crate::__forward! { unsafe [Address] u64; $($r)* } };

    (
        safe [$($type:ty),*] $result:ty;
        $name:ident [$($attr:tt)*] $layer:ident $call:ident ($inner:expr) [$($arg:ident)*] [$($around:expr)?]
    ) => {
        $($attr)*
        fn $name(&self, $($arg: $type),*) -> $result {
            let $layer = self;
            #[allow(unused_variables)]
            let $call = || $inner.$name($($arg),*);
            $crate::__forward!(around $call $($around)?)
        }
    };
    (
        unsafe [$($type:ty),*] $result:ty;
        $name:ident [$($attr:tt)*] $layer:ident $call:ident ($inner:expr) [$($arg:ident)*] [$($around:expr)?]
    ) => {
        $($attr)*
        unsafe fn $name(&self, $($arg: $type),*) -> $result {
            let $layer = self;
            // SAFETY: the caller's promise to this layer is what the driver inside demands.
            #[allow(unused_variables)]
            let $call = || unsafe { $inner.$name($($arg),*) };
            $crate::__forward!(around $call $($around)?)
        }
    };
    (around $call:ident) => { $call() };
    (around $call:ident $around:expr) => { $around };
}

#[cfg(feature = "blas")]
#[doc(hidden)]
#[macro_export]
macro_rules! __if_blas {
    ($($code:tt)*) => { $($code)* };
}

#[cfg(not(feature = "blas"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __if_blas {
    ($($code:tt)*) => {};
}

pub use crate::__forward as forward;
