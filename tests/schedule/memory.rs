//! Choice of the memory of snapshots.

use evermoe::schedule::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn snapshots_on_the_device_fit_and_no_other_would(
        nbytes in prop::collection::vec(0_u64..50, 0..9), free in 0_u64..150, reserve in 0_u64..60,
    ) {
        let places = snapshot_memory(free, &nbytes, reserve);
        let of = |memory: MemoryKind| (0..nbytes.len()).filter(|&unit| places[unit] == memory).collect::<Vec<_>>();
        let used: u64 = of(MemoryKind::Device).iter().map(|&unit| nbytes[unit]).sum();
        let room = free.saturating_sub(reserve);
        prop_assert!(used <= room);
        prop_assert!(of(MemoryKind::Host).iter().all(|&unit| used + nbytes[unit] > room), "{places:?}");
    }
}
