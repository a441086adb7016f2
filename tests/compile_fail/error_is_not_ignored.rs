#![deny(unused_must_use)]
use gpu_pool::GpuPool;

fn main() {
    GpuPool::scope(|_, _| Ok(())); //~ unused_must_use
    GpuPool::builder().host(1); //~ unused_must_use
}
