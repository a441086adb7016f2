use gpu_pool::GpuPool;

fn main() {
    let mut n = 0;
    let _ = GpuPool::scope(|_, _| {
        n += 1; //~ E0594
        Ok(())
    });
    println!("{n}");
}
