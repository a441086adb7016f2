//! The operations that a rule can name.

macro_rules! ops {
    ($($(#[$m:meta])* $name:ident $text:literal,)+) => {
        /// An operation of the [driver](crate::driver::Driver).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum FaultOp {
            $($(#[$m])* #[doc = concat!("\n\nAs text: `", $text, "`.")] $name,)+
        }

        impl FaultOp {
            /// All of them.
            pub const ALL: &'static [FaultOp] = &[$(FaultOp::$name),+];

            /// Its name in the text of a plan.
            pub fn name(self) -> &'static str {
                match self { $(FaultOp::$name => $text),+ }
            }
        }
    };
}

ops! {
    /// The context is made current.
    Bind "bind",
    /// Free and total memory are asked for.
    MemoryInfo "memory-info",
    /// Device memory is taken from the driver, by itself or as a mapping of a window.
    Alloc "alloc",
    /// Device memory is freed. It is, also when the call reports a fault.
    Free "free",
    /// Page-locked memory is allocated.
    HostAlloc "host-alloc",
    /// Page-locked memory is freed.
    HostFree "host-free",
    /// Managed memory is allocated.
    ManagedAlloc "managed-alloc",
    /// Managed memory is freed.
    ManagedFree "managed-free",
    /// A window of addresses is reserved.
    VmReserve "vm-reserve",
    /// A window of addresses is given back. It is, also when the call reports a fault.
    VmRelease "vm-release",
    /// Memory is mapped into a window; it is an [`Alloc`](Self::Alloc), too.
    VmMap "vm-map",
    /// Memory is taken out of a window. It is, also when the call reports a fault.
    VmUnmap "vm-unmap",
    /// Memory is moved to another place of a window.
    VmMove "vm-move",
    /// A stream is made.
    StreamCreate "stream-create",
    /// A stream is destroyed.
    StreamDestroy "stream-destroy",
    /// The host asks whether a stream is idle.
    StreamQuery "stream-query",
    /// The host waits for a stream; a long wait is many calls.
    StreamWait "stream-wait",
    /// A stream is made to wait for an event.
    Wait "wait",
    /// An event is made.
    EventCreate "event-create",
    /// An event is destroyed.
    EventDestroy "event-destroy",
    /// An event is recorded.
    Record "record",
    /// The host asks whether an event has passed.
    EventQuery "event-query",
    /// The host waits for an event; a long wait is many calls.
    EventWait "event-wait",
    /// The time between two events is asked for.
    EventElapsed "event-elapsed",
    /// A copy from page-locked memory.
    CopyUp "copy-up",
    /// A copy to page-locked memory.
    CopyDown "copy-down",
    /// A copy within a device.
    CopyWithin "copy-within",
    /// A direct copy between devices: either of the next two.
    CopyPeer "copy-peer",
    /// A direct copy to a peer's memory, on a stream of the device that owns the source.
    CopyToPeer "copy-to-peer",
    /// A direct copy from a peer's memory, on a stream of the device that owns the destination.
    CopyFromPeer "copy-from-peer",
    /// Memory is filled.
    Fill "fill",
    /// A device is asked whether it can be a peer of another.
    CanAccessPeer "can-access-peer",
    /// A right to a peer's memory is given.
    EnablePeer "enable-peer",
    /// A right to a peer's memory is taken back.
    DisablePeer "disable-peer",
    /// A module is loaded.
    ModuleLoad "module-load",
    /// A module is unloaded.
    ModuleUnload "module-unload",
    /// A kernel is looked up.
    Function "function",
    /// A kernel is launched.
    Launch "launch",
    /// A host function is put into a stream.
    LaunchHost "launch-host",
    /// A matrix product.
    Gemm "gemm",
    /// A stream begins to capture.
    CaptureBegin "capture-begin",
    /// A capture becomes a graph. It ends, also when the call reports a fault.
    CaptureEnd "capture-end",
    /// A graph is launched.
    GraphLaunch "graph-launch",
    /// A graph is destroyed.
    GraphDestroy "graph-destroy",
    /// A word is written in stream order.
    WriteValue "write-value",
    /// A stream is made to wait for a word.
    WaitValue "wait-value",
}

impl FaultOp {
    /// Whether it goes to a stream.
    pub fn is_submitted(self) -> bool {
        use FaultOp::*;
        let other =
            matches!(self, Wait | Record | Fill | Launch | LaunchHost | Gemm | GraphLaunch | WriteValue | WaitValue);
        other || self.is_copy()
    }

    /// Whether it is a copy.
    pub fn is_copy(self) -> bool {
        self.is_peer_copy() || matches!(self, FaultOp::CopyUp | FaultOp::CopyDown | FaultOp::CopyWithin)
    }

    /// Whether it is a direct copy between devices.
    pub fn is_peer_copy(self) -> bool {
        matches!(self, FaultOp::CopyPeer | FaultOp::CopyToPeer | FaultOp::CopyFromPeer)
    }
}
