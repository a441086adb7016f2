//! The operations that a rule can name.

macro_rules! ops {
    ($($(#[$m:meta])* $name:ident $text:literal,)+) => {
        /// An operation of the driver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum FaultOp {
            $($(#[$m])* #[doc = concat!("\n\nAs text: `", $text, "`.")] $name,)+
        }

        impl FaultOp {
            /// All operations.
            pub const ALL: &'static [FaultOp] = &[$(FaultOp::$name),+];

            /// Its name in the text of a plan.
            pub fn name(self) -> &'static str {
                match self { $(FaultOp::$name => $text),+ }
            }
        }
    };
}

ops! {
    /// Makes the context current.
    Bind "bind",
    /// Queries free and total memory.
    MemoryInfo "memory-info",
    /// Takes device memory from the driver, as an allocation or as a mapping.
    Alloc "alloc",
    /// Frees device memory. The memory is freed also when the call reports a fault.
    Free "free",
    /// Allocates page-locked memory.
    HostAlloc "host-alloc",
    /// Frees page-locked memory.
    HostFree "host-free",
    /// Allocates managed memory.
    ManagedAlloc "managed-alloc",
    /// Frees managed memory.
    ManagedFree "managed-free",
    /// Reserves a window of addresses.
    VmReserve "vm-reserve",
    /// Releases a window of addresses. The window is released also when the call reports a fault.
    VmRelease "vm-release",
    /// Maps memory into a window. This is an [`Alloc`](Self::Alloc), too.
    VmMap "vm-map",
    /// Unmaps memory from a window. The memory is unmapped also when the call reports a fault.
    VmUnmap "vm-unmap",
    /// Moves a mapping to other addresses.
    VmMove "vm-move",
    /// Makes a descriptor of a mapping, for other processes.
    VmExport "vm-export",
    /// Maps the memory behind another process's descriptor.
    VmImport "vm-import",
    /// Creates a stream.
    StreamCreate "stream-create",
    /// Destroys a stream.
    StreamDestroy "stream-destroy",
    /// Queries whether a stream is idle.
    StreamQuery "stream-query",
    /// Waits on the host for a stream; a long wait is many calls.
    StreamWait "stream-wait",
    /// Makes a stream wait for an event.
    Wait "wait",
    /// Creates an event.
    EventCreate "event-create",
    /// Destroys an event.
    EventDestroy "event-destroy",
    /// Records an event.
    Record "record",
    /// Queries whether an event is complete.
    EventQuery "event-query",
    /// Waits on the host for an event; a long wait is many calls.
    EventWait "event-wait",
    /// Queries the time between two events.
    EventElapsed "event-elapsed",
    /// A copy from page-locked memory.
    CopyUp "copy-up",
    /// A copy to page-locked memory.
    CopyDown "copy-down",
    /// A copy within a device.
    CopyWithin "copy-within",
    /// A direct copy between devices: includes [`CopyToPeer`](Self::CopyToPeer) and
    /// [`CopyFromPeer`](Self::CopyFromPeer).
    CopyPeer "copy-peer",
    /// A direct copy to a peer's memory, on a stream of the device that owns the source.
    CopyToPeer "copy-to-peer",
    /// A direct copy from a peer's memory, on a stream of the device that owns the destination.
    CopyFromPeer "copy-from-peer",
    /// Fills memory.
    Fill "fill",
    /// Queries whether a device can access a peer.
    CanAccessPeer "can-access-peer",
    /// Enables access to a peer's memory.
    EnablePeer "enable-peer",
    /// Disables access to a peer's memory.
    DisablePeer "disable-peer",
    /// Loads a module.
    ModuleLoad "module-load",
    /// Unloads a module.
    ModuleUnload "module-unload",
    /// Looks a kernel up.
    Function "function",
    /// Launches a kernel.
    Launch "launch",
    /// Submits a host function to a stream.
    LaunchHost "launch-host",
    /// A matrix product.
    Gemm "gemm",
    /// Begins a capture.
    CaptureBegin "capture-begin",
    /// Ends a capture and makes a graph. The capture ends also when the call reports a fault.
    CaptureEnd "capture-end",
    /// Launches a graph.
    GraphLaunch "graph-launch",
    /// Destroys a graph.
    GraphDestroy "graph-destroy",
    /// Writes a word in stream order.
    WriteValue "write-value",
    /// Makes a stream wait for a word.
    WaitValue "wait-value",
}

impl FaultOp {
    /// Whether the operation is submitted to a stream.
    pub fn is_submitted(self) -> bool {
        use FaultOp::*;
        let other =
            matches!(self, Wait | Record | Fill | Launch | LaunchHost | Gemm | GraphLaunch | WriteValue | WaitValue);
        other || self.is_copy()
    }

    /// Whether the operation is a copy.
    pub fn is_copy(self) -> bool {
        self.is_peer_copy() || matches!(self, FaultOp::CopyUp | FaultOp::CopyDown | FaultOp::CopyWithin)
    }

    /// Whether the operation is a direct copy between devices.
    pub fn is_peer_copy(self) -> bool {
        matches!(self, FaultOp::CopyPeer | FaultOp::CopyToPeer | FaultOp::CopyFromPeer)
    }
}
