//! Priority and number of background threads, which must not slow down training.

use std::thread;

/// Number of processors for this process: its share if LOCAL_WORLD_SIZE processes run on the machine, unless it is bound to some.
pub(crate) fn processors() -> usize {
    let available = thread::available_parallelism().map_or(1, usize::from);
    let ranks = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
    share(available, is_bound(), ranks.unwrap_or(1))
}

fn share(available: usize, is_bound: bool, ranks: usize) -> usize {
    if is_bound { available } else { (available / ranks.max(1)).max(1) }
}

/// Whether this process may not use all processors of the machine, as with `numactl` or `taskset`.
fn is_bound() -> bool {
    #[cfg(target_os = "linux")]
    // SAFETY: plain calls, and room for a set of processors.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        let online = libc::sysconf(libc::_SC_NPROCESSORS_ONLN);
        libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) == 0
            && i64::from(libc::CPU_COUNT(&set)) < online
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Lowers the priority of the calling thread: on Linux it becomes a batch job with its nice value raised by 5.
///
/// Best effort: where the system refuses, the priority is unchanged.
pub(crate) fn lower_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: plain calls; on Linux both affect only the calling thread.
    unsafe {
        let _ = libc::nice(5);
        let parameters = std::mem::zeroed::<libc::sched_param>();
        let _ = libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters);
    }
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn processes_of_a_node_share_its_processors_unless_each_is_bound_to_its_own() {
        assert_eq!(share(192, false, 8), 24);
        assert_eq!(share(24, true, 8), 24);
        assert_eq!(share(2, false, 4), 1);
        assert_eq!(share(16, false, 0), 16);
    }
}
