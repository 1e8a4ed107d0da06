//! Host memory on the NUMA node of a GPU: copies from the GPU do not cross to the other socket.
//!
//! Best effort: on a machine of one node, in a container that forbids the calls, or if the process was started with a
//! policy of its own (`numactl`), memory is allocated where it would be without this.

use std::fs;
use std::marker::PhantomData;
use std::path::Path;

/// Bits of a set of nodes: more than kernels support.
const MAX_NODES: usize = 1024;
const WORD: usize = usize::BITS as usize;

type Nodes = [usize; MAX_NODES / WORD];

/// Returns the NUMA node of a PCI device, from the folder of PCI devices in sysfs. None if the machine has no nodes or
/// the device is unknown.
///
/// `bus_id` is that of `cuDeviceGetPCIBusId`, such as `0000:3B:00.0`.
pub(crate) fn node_of(devices: &Path, bus_id: &str) -> Option<usize> {
    let node = fs::read_to_string(devices.join(bus_id.to_ascii_lowercase()).join("numa_node")).ok()?;
    node.trim().parse().ok().filter(|&node| node < MAX_NODES) // -1 without nodes
}

/// While it lives, memory that the calling thread is the first to touch comes from a node, if that has room.
#[must_use]
pub(crate) struct Near {
    is_set: bool,
    /// A policy belongs to a thread.
    _not_send: PhantomData<*const ()>,
}

impl Near {
    /// Prefers `node` from now on; changes nothing for None, and if the thread has a policy already.
    pub(crate) fn new(node: Option<usize>) -> Self {
        let is_set = node
            .is_some_and(|node| policy().is_some_and(|(mode, _)| mode == libc::MPOL_DEFAULT) && prefer(node));
        Self { is_set, _not_send: PhantomData }
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        if self.is_set {
            // SAFETY: the default policy takes no nodes.
            let _ = unsafe {
                libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_DEFAULT, std::ptr::null::<usize>(), 0_usize)
            };
        }
    }
}

/// The policy of the calling thread, and its nodes; None if the kernel refuses to say.
fn policy() -> Option<(libc::c_int, Nodes)> {
    let (mut mode, mut nodes, unused) = (0, [0; MAX_NODES / WORD], 0_usize);
    // SAFETY: an integer, and room for `MAX_NODES` bits.
    let status = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), MAX_NODES, unused, unused)
    };
    (status == 0).then_some((mode, nodes))
}

/// Returns whether the kernel now prefers a node for the calling thread.
fn prefer(node: usize) -> bool {
    let mut nodes: Nodes = [0; MAX_NODES / WORD];
    nodes[node / WORD] = 1 << (node % WORD);
    // SAFETY: the kernel reads `MAX_NODES` bits.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, nodes.as_ptr(), MAX_NODES) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_of_a_gpu_is_that_of_its_bus() {
        let devices = tempfile::tempdir().unwrap();
        for (bus_id, node) in [("0000:3b:00.0", "1\n"), ("0000:af:00.0", "-1\n"), ("0000:d8:00.0", "4096\n")]
        {
            fs::create_dir(devices.path().join(bus_id)).unwrap();
            fs::write(devices.path().join(bus_id).join("numa_node"), node).unwrap();
        }
        let found = ["0000:3B:00.0", "0000:3b:00.0", "0000:AF:00.0", "0000:D8:00.0", "0000:00:00.0"];
        assert_eq!(found.map(|bus_id| node_of(devices.path(), bus_id)), [Some(1), Some(1), None, None, None]);
    }

    #[test]
    fn a_thread_prefers_a_node_until_the_guard_is_dropped() {
        if policy().is_none_or(|(mode, _)| mode != libc::MPOL_DEFAULT) {
            eprintln!("skipped: this kernel has no policies, or the process has its own");
            return;
        }
        let mode = || policy().unwrap().0;
        {
            let _near = Near::new(Some(0));
            let (mode, nodes) = policy().unwrap();
            assert_eq!((mode, nodes[0]), (libc::MPOL_PREFERRED, 1));
            drop(Near::new(Some(0))); // there is one already, which stays
            assert_eq!(policy().unwrap().0, libc::MPOL_PREFERRED);
        }
        assert_eq!(mode(), libc::MPOL_DEFAULT);
        let _near = Near::new(None);
        assert_eq!(mode(), libc::MPOL_DEFAULT);
        drop(Near::new(Some(MAX_NODES - 1))); // no machine has it
        assert_eq!(mode(), libc::MPOL_DEFAULT);
    }
}
