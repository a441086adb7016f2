//! Types that must stay on their device's thread, and the compiler's message if a program sends one to another thread.
//!
//! They contain `Rc`s, so they are neither `Send` nor `Sync` anyway. But then rustc reports each private field with the
//! path to it. With an implementation whose condition never holds, rustc reports only the condition, in our words.

/// No type implements it, and no other crate can, since the module is private. For returned values, rustc uses its own
/// message, which contains the name of this trait: so the name states the rule.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is `DeviceThreadOnly`: it can neither be sent to another thread nor be shared with one",
    label = "this takes a `{Self}` away from its device's thread",
    note = "work on a device is done in the closures of `GpuPool::run` and its like, which run on the device's thread",
    note = "to keep a value there between scopes: `GpuPool::per_device`"
)]
pub trait NotDeviceThreadOnly {}

/// The result of a closure for the thread that has started its scope. Every type that can be sent is it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be returned: what a closure returns is sent to the thread that has started the scope",
    label = "this returns a `{Self}` from its device's thread",
    note = "work on a device is done in the closures of `GpuPool::run` and its like, which run on the device's thread",
    note = "to keep a value there between scopes: `GpuPool::per_device`"
)]
pub trait Returned: Send {}
impl<T: Send> Returned for T {}

/// Makes types `!Send` and `!Sync`, with a message of our own.
macro_rules! device_thread_only {
    ($([$($generics:tt)*] $type:ty),+ $(,)?) => {$(
        // SAFETY: no type implements the trait, so the condition never holds, and this implements nothing. (Without the
        // lifetime, rustc would refuse a condition that is always false.)
        #[doc(hidden)]
        unsafe impl<$($generics)*> Send for $type where for<'never> $type: $crate::sync::NotDeviceThreadOnly {}
        // SAFETY: as above.
        #[doc(hidden)]
        unsafe impl<$($generics)*> Sync for $type where for<'never> $type: $crate::sync::NotDeviceThreadOnly {}
    )+};
}

pub(crate) use device_thread_only;
