//! Threads beside training, which give way to its own.

/// Makes the calling thread one that gives way: on Linux a batch job with a nice value 5 higher than before. Best effort: a
/// system that refuses leaves it as important as the others.
pub(crate) fn give_way() {
    #[cfg(target_os = "linux")]
    // SAFETY: plain calls; on Linux both are about the calling thread alone.
    unsafe {
        let _ = libc::nice(5);
        let parameters = std::mem::zeroed::<libc::sched_param>();
        let _ = libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters);
    }
}
