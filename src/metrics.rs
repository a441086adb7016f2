//! The numbers of pools and queues of jobs, as gauges and counters of the facade [`metrics`]: its exporters
//! (Prometheus, StatsD, ..) pass them on.
//!
//! Programs call the two methods as often as they want new values, from any thread. Nothing here is called by the
//! library, so a program that does not call them pays nothing. The file may use pools and jobs.

use crate::{GpuPool, jobs::Jobs, memory::MemoryStats};
use metrics::{counter, gauge};

impl GpuPool {
    /// Sets the metrics of this pool, with a label `device` each:
    ///
    /// | gauge | |
    /// |---|---|
    /// | `gpu_pool_memory_in_use_bytes`, `.._peak_bytes`, `.._reserved_bytes`, `.._adopted_bytes` | as in [`MemoryStats`] |
    /// | `gpu_pool_device_lost` | 1 if the device is lost, 0 otherwise |
    ///
    /// | counter | |
    /// |---|---|
    /// | `gpu_pool_allocations_total`, `gpu_pool_driver_calls_total` | as in [`MemoryStats`] |
    ///
    /// Call it before each scrape, or every few seconds. It reads published words: it waits for no device, and costs
    /// some microseconds.
    ///
    /// Without an exporter nothing happens. The guide's page "Logging and metrics" has a program with
    /// `metrics-exporter-prometheus` and `tracing-subscriber`.
    pub fn publish_metrics(&self) {
        let lost = self.report().lost;
        for (device, (stats, lost)) in self.memory_stats().into_iter().zip(lost).enumerate() {
            let MemoryStats { in_use, peak, reserved, adopted, allocations, driver_calls, .. } = stats;
            let device = device.to_string();
            gauge!("gpu_pool_memory_in_use_bytes", "device" => device.clone()).set(in_use as f64);
            gauge!("gpu_pool_memory_peak_bytes", "device" => device.clone()).set(peak as f64);
            gauge!("gpu_pool_memory_reserved_bytes", "device" => device.clone()).set(reserved as f64);
            gauge!("gpu_pool_memory_adopted_bytes", "device" => device.clone()).set(adopted as f64);
            gauge!("gpu_pool_device_lost", "device" => device.clone()).set(f64::from(u8::from(lost)));
            counter!("gpu_pool_allocations_total", "device" => device.clone()).absolute(allocations);
            counter!("gpu_pool_driver_calls_total", "device" => device).absolute(driver_calls);
        }
    }
}

impl Jobs {
    /// Sets the metrics of this queue, with the label `queue`:
    ///
    /// | gauge | |
    /// |---|---|
    /// | `gpu_pool_jobs_queued`, `gpu_pool_jobs_running` | as in [`JobStats`](crate::jobs::JobStats) |
    /// | `gpu_pool_jobs_booked_bytes`, `gpu_pool_jobs_busy_ratio` | of each device, with a label `device` |
    ///
    /// | counter | |
    /// |---|---|
    /// | `gpu_pool_jobs_done_total`, `.._failed_total`, `.._cancelled_total`, `.._retried_total`, `.._moved_total` | |
    pub fn publish_metrics(&self, queue: &str) {
        let (stats, queue) = (self.stats(), queue.to_owned());
        gauge!("gpu_pool_jobs_queued", "queue" => queue.clone()).set(stats.queued as f64);
        gauge!("gpu_pool_jobs_running", "queue" => queue.clone()).set(stats.running as f64);
        counter!("gpu_pool_jobs_done_total", "queue" => queue.clone()).absolute(stats.done);
        counter!("gpu_pool_jobs_failed_total", "queue" => queue.clone()).absolute(stats.failed);
        counter!("gpu_pool_jobs_cancelled_total", "queue" => queue.clone()).absolute(stats.cancelled);
        counter!("gpu_pool_jobs_retried_total", "queue" => queue.clone()).absolute(stats.retried);
        counter!("gpu_pool_jobs_moved_total", "queue" => queue.clone()).absolute(stats.moved);
        for (device, of) in stats.devices.iter().enumerate() {
            let labels = [("queue", queue.clone()), ("device", device.to_string())];
            gauge!("gpu_pool_jobs_booked_bytes", &labels).set(of.booked as f64);
            gauge!("gpu_pool_jobs_busy_ratio", &labels).set(of.busy);
        }
    }
}
