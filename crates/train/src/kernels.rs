//! This crate's device code: `kernels/*.cu` of its folder. `ops` declares its entries, with their host kernels.
//!
//! A device loads a module at the first launch of its kernels: a program has no code of families that it does not call.

macro_rules! modules {
    ($($name:ident $file:literal;)+) => {$(
        #[doc = concat!("`kernels/", $file, ".cu`")]
        pub(crate) static $name: gpu_pool::Module = gpu_pool::extend::train::module(
            include_bytes!(concat!("../kernels/ptx/", $file, ".ptx.zst")),
            &[
                (80, include_bytes!(concat!("../kernels/ptx/", $file, ".sm_80.cubin.lz4"))),
                (90, include_bytes!(concat!("../kernels/ptx/", $file, ".sm_90.cubin.lz4"))),
            ],
        );
    )+};
}
modules! {
    POINTWISE "pointwise";
    NUMBER "number";
    ORDER "order";
    ROWS "rows";
    COLUMNS "columns";
    SHAPE "shape";
    EMBEDDING "embedding";
    VOCABULARY "vocabulary";
    RANDOM "random";
    OPTIMIZER "optimizer";
    SHARDED "sharded";
}
