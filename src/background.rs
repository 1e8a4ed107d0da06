//! Priority and number of background threads, which must not slow down training.

use std::thread;

/// Number of processors for this process: its share if LOCAL_WORLD_SIZE processes run on the machine, unless it has its own.
pub(crate) fn processors() -> usize {
    let available = thread::available_parallelism().map_or(1, usize::from);
    let ranks = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
    share(available, &affinity(0), &affinity(parent()), ranks.unwrap_or(1))
}

/// The processors of one of `ranks` processes, which have `available` together, or each, if it is bound.
///
/// A process that `numactl`, `taskset` or its launcher has bound may run on other processors than its parent. What a
/// container allows, or a binding of the launcher itself, is the same for both, and all ranks share it.
fn share(available: usize, own: &[usize], parents: &[usize], ranks: usize) -> usize {
    if parents.is_empty() || own == parents { (available / ranks.max(1)).max(1) } else { available }
}

fn parent() -> i32 {
    // SAFETY: a plain call. 0, which stands for this process, if the parent is outside of its container.
    unsafe { libc::getppid() }
}

/// Processors on which a process may run, in ascending order; empty if unknown.
fn affinity(process: i32) -> Vec<usize> {
    #[cfg(target_os = "linux")]
    // SAFETY: plain calls, with room for a set of processors.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        if libc::sched_getaffinity(process, size_of_val(&set), &raw mut set) == 0 {
            return (0..libc::CPU_SETSIZE as usize).filter(|&each| libc::CPU_ISSET(each, &set)).collect();
        }
    }
    let _ = process;
    Vec::new()
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
    use super::{affinity, share};

    #[test]
    fn processes_of_a_node_share_its_processors_unless_each_is_bound_to_its_own() {
        let (machine, container, own): (Vec<_>, Vec<_>, Vec<_>) =
            ((0..192).collect(), (48..96).collect(), (24..48).collect());
        assert_eq!(share(192, &machine, &machine, 8), 24, "nothing is bound");
        assert_eq!(share(24, &own, &machine, 8), 24, "each rank is bound");
        assert_eq!(share(48, &container, &container, 8), 6, "one container, or one binding of the launcher");
        assert_eq!(share(24, &container[..24], &container, 2), 24, "each rank is bound in a container");
        assert_eq!(share(16, &machine, &machine, 8), 2, "a quota of processor time");
        assert_eq!(share(192, &machine, &[], 8), 24, "an unknown parent");
        assert_eq!(share(2, &machine, &machine, 4), 1);
        assert_eq!(share(16, &machine, &machine, 0), 16);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_knows_its_processors() {
        assert_eq!(affinity(0), affinity(std::process::id().cast_signed()));
        assert!(affinity(0).len() >= std::thread::available_parallelism().unwrap().get());
        assert!(affinity(-1).is_empty());
    }
}
