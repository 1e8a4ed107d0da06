//! Where snapshots lie, and how units are shared among ranks.

use evermoe::schedule::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn snapshots_on_the_device_fit_and_no_other_would(
        nbytes in prop::collection::vec(0_u64..50, 0..9), free in 0_u64..150, reserve in 0_u64..60,
    ) {
        let places = snapshot_places(free, &nbytes, reserve);
        let of = |place: Place| (0..nbytes.len()).filter(|&unit| places[unit] == place).collect::<Vec<_>>();
        let used: u64 = of(Place::Device).iter().map(|&unit| nbytes[unit]).sum();
        let room = free.saturating_sub(reserve);
        prop_assert!(used <= room);
        prop_assert!(of(Place::Host).iter().all(|&unit| used + nbytes[unit] > room), "{places:?}");
    }

    #[test]
    fn shares_by_bytes_are_even_to_within_a_unit(nbytes in prop::collection::vec(0_u64..50, 0..20), ranks in 1_usize..6) {
        let mut loads = vec![0; ranks];
        for (unit, rank) in unit_shares(&nbytes, ranks, Share::Bytes).unwrap().into_iter().enumerate() {
            loads[rank] += nbytes[unit];
        }
        let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
        prop_assert!(spread <= nbytes.iter().copied().max().unwrap_or(0), "{loads:?}");
        let modulo: Vec<usize> = (0..nbytes.len()).map(|unit| unit % ranks).collect();
        prop_assert_eq!(unit_shares(&nbytes, ranks, Share::Modulo).unwrap(), modulo);
    }
}
