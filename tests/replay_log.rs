//! Records return their input, no flipped bit passes, and the log stays in order and within its bound.

use evermoe::cpu::{AdamWOptions, AdamWStep, Arithmetic, Gradient, Parallel, Serial, adamw};
use evermoe::replay::{
    Accepted, BLOCK, Encoding, Fault, HEADER_BYTES, Header, Kind, Log, Record, Rule, Stored, encode_gradient,
    ignores_sign_of_zero, most_payload_bytes, state_digest,
};
use half::bf16;
use proptest::prelude::*;
use std::ops::Range;

const UNIT: u64 = 0x0123_4567_89ab_cdef;

/// Ranges of one item, the last one first.
struct Backwards;

impl Parallel for Backwards {
    fn run(&self, len: usize, _: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        (0..len).rev().for_each(|index| body(index..index + 1));
    }
}

fn rule(t: i64) -> Rule {
    let options = AdamWOptions { lr: 0.1, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, maximize: false };
    Rule::AdamW(AdamWStep::new(&options, t, 1.0, 1.0).unwrap().to_array())
}

fn header(kind: Kind, step: u64, elements: usize) -> Header {
    let rule = if kind == Kind::Step { rule(step as i64) } else { Rule::None };
    Header { kind, encoding: Encoding::Zero, rule, unit: UNIT, step, t: step, elements, payload_bytes: 0 }
}

/// The record of a step with a gradient.
fn record_of(step: u64, gradient: Gradient<'_>, len: usize, any_zero: bool, pool: &dyn Parallel) -> Vec<u8> {
    let mut bytes = vec![0xee; HEADER_BYTES + most_payload_bytes(len)];
    let encoded = encode_gradient(gradient, len, any_zero, &mut bytes[HEADER_BYTES..], pool);
    let (encoding, payload_bytes) = (encoded.encoding, encoded.payload_bytes);
    let header = Header { encoding, payload_bytes, ..header(Kind::Step, step, len) };
    bytes[..HEADER_BYTES].copy_from_slice(&header.seal(encoded.digest));
    bytes.truncate(HEADER_BYTES + payload_bytes);
    bytes
}

fn step_record(step: u64, values: &[f32]) -> Vec<u8> {
    record_of(step, Gradient::F32(values), values.len(), false, &Serial)
}

fn plain_record(kind: Kind, step: u64, len: usize) -> Vec<u8> {
    header(kind, step, len).seal(Header::digest(&[], &Serial)).to_vec()
}

fn state_record(step: u64, elements: usize, state: &[u8]) -> Vec<u8> {
    let header = Header { payload_bytes: state.len(), ..header(Kind::FullState, step, elements) };
    [&header.seal(Header::digest(state, &Serial)), state].concat()
}

/// A log of one unit with its state at step 0.
fn log_of(elements: usize, limit: usize) -> Log {
    let mut log = Log::new(&[(UNIT, elements, 12 * elements)], limit).unwrap();
    let state = vec![7; 12 * elements];
    let accepted = log.accept(&state_record(0, elements, &state), &Serial).unwrap();
    assert_eq!(accepted, Accepted::State { unit: 0, digest: state_digest(&[&state], &Serial) });
    assert_eq!((log.version(0), log.needs_state(0)), (None, true));
    log.installed(0);
    log
}

fn widen(stored: &Option<Stored>, len: usize) -> Vec<u32> {
    match stored {
        None => vec![0; len],
        Some(Stored::F32(values)) => values.iter().map(|value| value.to_bits()).collect(),
        Some(Stored::Bf16(values)) => values.iter().map(|value| u32::from(value.to_bits()) << 16).collect(),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// One kind of block each: +0, zeros of both signs, bfloat16, float32, and one word that is the only one of its kind.
fn block(kind: u8, seed: u32, len: usize) -> Vec<f32> {
    let word = |index: usize| (index as u32 ^ seed).wrapping_mul(2_654_435_761) | 1;
    let value = |index: usize| match kind {
        0 => 0,
        1 => word(index) & 0x8000_0000,
        2 => word(index) & 0xffff_0000,
        3 => word(index),
        4 => u32::from(index == seed as usize % len) << 16,
        _ => u32::from(index == seed as usize % len),
    };
    (0..len).map(|index| f32::from_bits(value(index))).collect()
}

prop_compose! {
    fn gradient()(kinds in prop::collection::vec((0..6_u8, any::<u32>()), 1..9), cut in 0..BLOCK) -> Vec<f32> {
        let mut values: Vec<f32> = kinds.iter().flat_map(|&(kind, seed)| block(kind, seed, BLOCK)).collect();
        values.truncate(values.len() - cut);
        values
    }
}

/// Fewest bytes with a tag for each block, counted in the simplest way.
fn fewest_bytes(values: &[f32], any_zero: bool) -> usize {
    let is_zero = |v: &f32| v.to_bits() == 0 || (any_zero && *v == 0.0);
    let blocks = values.chunks(BLOCK).map(|block| match block {
        _ if block.iter().all(is_zero) => 0,
        _ if block.iter().all(|v| v.to_bits() & 0xffff == 0) => 2 * block.len(),
        _ => 4 * block.len(),
    });
    blocks.sum()
}

proptest! {
    #[test]
    fn gradient_comes_back_in_few_bytes(values in gradient(), any_zero: bool) {
        let len = values.len();
        let bytes = record_of(1, Gradient::F32(&values), len, any_zero, &Serial);
        prop_assert_eq!(&bytes, &record_of(1, Gradient::F32(&values), len, any_zero, &Backwards));
        let fewest = fewest_bytes(&values, any_zero);
        let payload = bytes.len() - HEADER_BYTES;
        prop_assert!(payload <= fewest * 16 / 15 + len.div_ceil(4 * BLOCK), "{payload} for {fewest}");
        let mut log = log_of(len, 1 << 20);
        prop_assert_eq!(log.accept(&bytes, &Backwards), Ok(Accepted::Logged { unit: 0 }));
        let batch = log.take(0, 8, 9, &Serial).unwrap();
        let mut got = widen(&batch.gradients[0], len);
        let mut expected = bits(&values);
        if any_zero {
            for word in got.iter_mut().chain(&mut expected) {
                *word = if *word == 1 << 31 { 0 } else { *word };
            }
        }
        prop_assert_eq!(got, expected);
        prop_assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
        prop_assert_eq!((log.bytes(), log.version(0)), (0, Some(1)));
    }

    #[test]
    fn bfloat16_gradient_comes_back(values in gradient()) {
        let narrow: Vec<bf16> = values.iter().map(|v| bf16::from_bits((v.to_bits() >> 16) as u16)).collect();
        let wide: Vec<f32> = narrow.iter().map(|v| f32::from_bits(u32::from(v.to_bits()) << 16)).collect();
        let bytes = record_of(1, Gradient::Bf16(&narrow), narrow.len(), false, &Serial);
        prop_assert_eq!(&bytes, &step_record(1, &wide));
        let mut log = log_of(wide.len(), 1 << 20);
        log.accept(&bytes, &Serial).unwrap();
        prop_assert_eq!(widen(&log.take(0, 1, 1, &Serial).unwrap().gradients[0], wide.len()), bits(&wide));
    }

    #[test]
    fn flipped_bit_or_cut_is_found(values in gradient(), at: prop::sample::Index, bit in 0..8_u8, cut: prop::sample::Index) {
        let bytes = step_record(1, &values);
        let mut log = log_of(values.len(), 1 << 20);
        let mut flipped = bytes.clone();
        flipped[at.index(bytes.len())] ^= 1 << bit;
        prop_assert!(log.accept(&flipped, &Serial).is_err());
        prop_assert!(log.accept(&bytes[..cut.index(bytes.len())], &Serial).is_err());
        prop_assert_eq!(log.bytes(), 0);
    }
}

#[test]
fn every_flipped_bit_of_small_records_is_found() {
    let state: Vec<u8> = (0..12 * 5).collect();
    let records = [
        step_record(1, &[1.5, 0.1, 2.0, -0.0, 0.0]),
        step_record(1, &[0.0; 5]),
        plain_record(Kind::NoStep, 1, 5),
        plain_record(Kind::SkipAll, 1, 5),
        state_record(9, 5, &state),
    ];
    for bytes in records {
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let (unit, fault) = log_of(5, 1000).accept(&flipped, &Serial).unwrap_err();
            let expected = match bit / 8 {
                4 => matches!(fault, Fault::UnknownVersion(_)),
                8..16 => unit.is_none() && matches!(fault, Fault::WrongUnit(_)),
                _ => matches!(fault, Fault::Corrupt(_)),
            };
            assert!(expected, "bit {bit}: {fault:?}");
        }
    }
}

#[test]
fn header_is_as_described() {
    let header = Header { unit: 0x0102, t: 2, elements: 0, ..header(Kind::NoStep, 3, 0) };
    let bytes = header.seal(Header::digest(&[], &Serial));
    let words = [0x0102_u64, 3, 2, 0, 0].map(u64::to_le_bytes).concat();
    let start = [b"EVMR\x02\x01\x00\x00".as_slice(), &words, &[0; 40]].concat();
    assert_eq!(bytes[..88], start[..]);
    let record = Record::parse(&bytes).unwrap();
    record.verify(&Serial).unwrap();
    assert_eq!((record.header, record.payload.len()), (header, 0));
}

#[test]
fn mixed_blocks_are_as_described() {
    let values = [block(0, 0, BLOCK), block(2, 1, BLOCK), block(3, 2, BLOCK)].concat();
    let bytes = step_record(1, &values);
    assert_eq!((bytes.len() - HEADER_BYTES, bytes[HEADER_BYTES]), (6145, 0b10_01_00));
    assert_eq!(
        bytes[HEADER_BYTES + 1 + 2048..],
        values[2 * BLOCK..].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()
    );
}

#[test]
fn gap_breaks_the_unit_until_its_state_comes() {
    let mut log = log_of(3, 4000);
    let step = |step| step_record(step, &[step as f32, 0.1, 0.2]);
    assert_eq!(log.accept(&step(1), &Serial), Ok(Accepted::Logged { unit: 0 }));
    assert_eq!(log.accept(&step(1), &Serial), Ok(Accepted::Duplicate { unit: 0 }));
    assert_eq!(log.accept(&step(3), &Serial), Err((Some(0), Fault::Gap { expected: 2, got: 3 })));
    assert_eq!(log.accept(&step(2), &Serial), Err((Some(0), Fault::NoState { step: 2 })));
    assert_eq!(log.newest(0), Some(1), "what was logged holds");
    assert_eq!(log.take(0, 8, 9, &Serial).unwrap().version, 1);
    log.accept(&state_record(3, 3, &[1; 36]), &Serial).unwrap();
    log.installed(0);
    assert_eq!(log.accept(&step(4), &Serial), Ok(Accepted::Logged { unit: 0 }));
    assert_eq!(log.newest(0), Some(4));
}

#[test]
fn another_record_of_the_same_or_an_earlier_step_is_no_duplicate() {
    for late in [step_record(2, &[9.0]), step_record(1, &[1.0])] {
        let mut log = log_of(1, 4000);
        for step in 1..3 {
            log.accept(&step_record(step, &[step as f32]), &Serial).unwrap();
        }
        let fault = log.accept(&late, &Serial).unwrap_err().1;
        assert!(matches!(fault, Fault::Reordered { expected: 3, .. }), "{fault:?}");
        assert!(log.needs_state(0));
    }
}

#[test]
fn sizes_and_states_that_do_not_fit_are_faults() {
    let mut log = Log::new(&[(UNIT, 3, 36)], 1000).unwrap();
    assert_eq!(log.accept(&step_record(1, &[1.0; 3]), &Serial), Err((Some(0), Fault::NoState { step: 1 })));
    let wrong = Fault::WrongSize { expected: 3, got: 4 };
    assert_eq!(log.accept(&step_record(1, &[1.0; 4]), &Serial), Err((Some(0), wrong)));
    let wrong = Fault::WrongSize { expected: 36, got: 35 };
    assert_eq!(log.accept(&state_record(1, 3, &[0; 35]), &Serial), Err((Some(0), wrong)));
    let other = Header { unit: 5, ..header(Kind::NoStep, 1, 3) }.seal(Header::digest(&[], &Serial));
    assert_eq!(log.accept(&other, &Serial), Err((None, Fault::WrongUnit(5))));
}

#[test]
fn bound_holds_and_says_apply_now() {
    let values = vec![0.1_f32; 1000];
    let limit = 10_000;
    let mut log = log_of(1000, limit);
    let (mut step, mut refused) = (0, 0);
    while step < 50 {
        match log.accept(&step_record(step + 1, &values), &Serial).unwrap() {
            Accepted::Logged { .. } => step += 1,
            Accepted::ApplyNow { unit } => {
                refused += 1;
                let batch = log.take(unit, 8, u64::MAX, &Serial).unwrap();
                let before = log.bytes();
                assert!(log.applied(unit, batch.epoch, batch.version, batch.bytes));
                assert!(log.bytes() < before);
            }
            other => panic!("{other:?}"),
        }
        assert!(log.bytes() <= limit);
    }
    assert!(refused >= 24, "two records fit at a time");
}

#[test]
fn runs_of_nothing_take_no_memory() {
    let mut log = log_of(1000, 5000);
    for step in 1..100_000 {
        let kind = if step % 2 == 0 { Kind::NoStep } else { Kind::SkipAll };
        assert_eq!(log.accept(&plain_record(kind, step, 1000), &Serial), Ok(Accepted::Logged { unit: 0 }));
    }
    assert!(log.bytes() < 200);
    let batch = log.take(0, 8, 70_000, &Serial).unwrap();
    assert_eq!((batch.version, batch.gradients.len()), (70_000, 0));
    assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
    assert_eq!(log.take(0, 8, u64::MAX, &Serial).unwrap().version, 99_999);
}

#[test]
fn steps_before_the_first_of_a_unit_are_taken_one_by_one() {
    let mut log = log_of(3, 4000);
    let none = |step| Header { t: 0, ..header(Kind::NoStep, step, 3) }.seal(Header::digest(&[], &Serial));
    (1..=3).for_each(|step| assert!(log.accept(&none(step), &Serial).is_ok()));
    for until in 1..=3 {
        let batch = log.take(0, 8, until, &Serial).unwrap();
        assert_eq!((batch.version, batch.t), (until, None));
        log.applied(0, batch.epoch, batch.version, batch.bytes);
    }
}

#[test]
fn batches_are_cut_by_steps_and_by_version() {
    let mut log = log_of(2, 10_000);
    for step in 1..=20 {
        let bytes = match step {
            4 => plain_record(Kind::NoStep, step, 2),
            5..8 => step_record(step, &[0.0, 0.0]),
            _ => step_record(step, &[step as f32, 0.1]),
        };
        log.accept(&bytes, &Serial).unwrap();
    }
    let mut seen = Vec::new();
    for (most, until) in [(2, 99), (8, 5), (8, 5), (8, 99), (8, 99), (8, 99)] {
        let Some(batch) = log.take(0, most, until, &Serial) else {
            seen.push((0, 0, None));
            continue;
        };
        assert_eq!(batch.numbers.len(), 10 * batch.gradients.len());
        seen.push((batch.version, batch.gradients.len(), batch.t));
        assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
    }
    let expected =
        [(2, 2, Some(2)), (5, 2, Some(5)), (0, 0, None), (13, 8, Some(13)), (20, 7, Some(20)), (0, 0, None)];
    assert_eq!(seen, expected);
    assert_eq!(log.bytes(), 0);
}

#[test]
fn full_state_makes_a_batch_that_is_under_way_void() {
    let mut log = log_of(1, 4000);
    log.accept(&step_record(1, &[0.1]), &Serial).unwrap();
    let batch = log.take(0, 8, 9, &Serial).unwrap();
    log.accept(&state_record(7, 1, &[0; 12]), &Serial).unwrap();
    assert!(!log.applied(0, batch.epoch, batch.version, batch.bytes));
    log.installed(0);
    assert_eq!((log.version(0), log.bytes()), (Some(7), 0));
}

#[test]
fn limits_that_cannot_work_are_refused() {
    assert!(Log::new(&[(1, 1000, 12_000)], 4000).unwrap_err().to_string().contains("log_bytes"));
    assert!(Log::new(&[(1, 1, 12), (1, 1, 12)], 4000).unwrap_err().to_string().contains("number 1"));
}

/// All states and options in which a zero's sign could matter, with one step and then another.
#[test]
fn sign_of_zero_is_dropped_only_where_it_makes_no_difference() {
    let special = [0.0, -0.0, f32::from_bits(1), -f32::from_bits(1), 1e-38, -1e-38, 1.0, -1.0];
    let mut differs_where_it_may = false;
    for arithmetic in Arithmetic::ALL {
        for (beta1, maximize, weight_decay) in
            [0.9, 0.6, 0.5, 0.3, 0.0].into_iter().flat_map(|b| [(b, false, 0.0), (b, true, 0.1)])
        {
            let options = AdamWOptions { lr: 0.1, betas: [beta1, 0.99], eps: 1e-8, weight_decay, maximize };
            let powers = (arithmetic == Arithmetic::TorchCudaFused).then_some([beta1 as f32, 0.99]);
            let step = AdamWStep::with_arithmetic(arithmetic, &options, 1, powers, 2.0, 0.5).unwrap();
            let run = |zero: f32| {
                let mut state = [Vec::new(), Vec::new(), Vec::new()];
                for p in special {
                    for m in special {
                        for v in [0.0, f32::from_bits(1), 1e-38, 1.0] {
                            for (array, value) in state.iter_mut().zip([p, m, v]) {
                                array.push(value);
                            }
                        }
                    }
                }
                let [p, m, v] = &mut state;
                let gradient = vec![zero; p.len()];
                let steps = [(step, Gradient::F32(&gradient[..])), (step, Gradient::F32(&gradient[..]))];
                adamw(p, m, v, None, &steps, &Serial);
                state.map(|values| bits(&values))
            };
            let same = run(0.0) == run(-0.0);
            let ignored = ignores_sign_of_zero(&Rule::AdamW(step.to_array()));
            assert!(same || !ignored, "{arithmetic:?}, beta1 {beta1}");
            differs_where_it_may |= !same;
        }
    }
    assert!(differs_where_it_may, "the signs make a difference to some state");
}

fn newest_values(log: &mut Log, until: u64) -> Vec<(Vec<f32>, Option<Stored>)> {
    let mut found = Vec::new();
    while let Some(batch) = log.take(0, 1, until, &Serial) {
        assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
        found.extend(batch.gradients.into_iter().map(|gradient| (batch.numbers.clone(), gradient)));
    }
    found
}

#[test]
fn a_held_step_counts_only_when_it_is_released_and_with_its_clipping() {
    let mut log = log_of(4, 1 << 16);
    log.release(1.0); // of nothing
    let before = log.bytes();
    assert_eq!(log.hold(&step_record(1, &[1.0, 2.0, 3.0, 4.0]), &Serial), Ok(Accepted::Logged { unit: 0 }));
    assert!(log.bytes() > before);
    assert_eq!(log.newest(0), Some(0));
    assert!(log.take(0, 8, 9, &Serial).is_none());

    let again = step_record(1, &[0.1, 0.2, 0.3, 0.7]);
    for _ in 0..2 {
        assert_eq!(log.hold(&again, &Serial), Ok(Accepted::Logged { unit: 0 }));
    }
    log.release(0.25);
    assert_eq!(log.newest(0), Some(1));
    let [(numbers, gradient)] = &newest_values(&mut log, 9)[..] else { panic!("one step") };
    assert_eq!((numbers[2], gradient), (0.25, &Some(Stored::F32(vec![0.1, 0.2, 0.3, 0.7]))));
    assert_eq!(log.bytes(), before);
    assert_eq!(log.hold(&again, &Serial), Ok(Accepted::Duplicate { unit: 0 }));
}

#[test]
fn a_held_step_that_the_trainers_leave_out_counts_and_changes_nothing() {
    let mut log = log_of(4, 1 << 16);
    let before = log.bytes();
    let bad = step_record(1, &[f32::NAN, 2.0, f32::INFINITY, 4.0]);
    assert_eq!(log.hold(&bad, &Serial), Ok(Accepted::Logged { unit: 0 }));
    log.skip();
    assert_eq!(log.newest(0), Some(1));
    assert_eq!(log.hold(&bad, &Serial), Ok(Accepted::Duplicate { unit: 0 }));
    let next = step_record(2, &[0.1, 0.2, 0.3, 0.7]);
    assert_eq!(log.hold(&next, &Serial), Ok(Accepted::Logged { unit: 0 }));
    log.release(1.0);
    let batch = log.take(0, 8, 9, &Serial).expect("both steps");
    assert_eq!((batch.version, batch.gradients.len()), (2, 1));
    assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
    assert_eq!(log.bytes(), before);
}

#[test]
fn a_held_step_takes_room_and_a_full_state_ends_it() {
    let record = step_record(1, &[1.0; 64]);
    let mut log = log_of(64, 4 * 64 + 200);
    assert_eq!(log.hold(&record, &Serial), Ok(Accepted::Logged { unit: 0 }));
    assert_eq!(log.hold(&record, &Serial), Ok(Accepted::Logged { unit: 0 }));
    assert!(log.fullest().is_none());
    let state = state_record(1, 64, &[3; 12 * 64]);
    assert!(matches!(log.hold(&state, &Serial), Ok(Accepted::State { unit: 0, .. })));
    log.installed(0);
    assert_eq!(log.bytes(), 0);
    log.release(1.0);
    assert_eq!(log.newest(0), Some(1));
}

fn proof_record(step: u64, elements: usize, digest: u64) -> Vec<u8> {
    let payload = digest.to_le_bytes();
    let header = Header { payload_bytes: payload.len(), ..header(Kind::Proof, step, elements) };
    [&header.seal(Header::digest(&payload, &Serial))[..], &payload].concat()
}

/// A proof ends a batch at its step, is returned once at that step, and changes nothing else.
#[test]
fn batch_ends_where_the_trainer_has_sent_its_digest() {
    let mut log = log_of(1, 100_000);
    for step in 1..=6 {
        assert_eq!(log.hold(&step_record(step, &[1.0]), &Serial), Ok(Accepted::Logged { unit: 0 }));
        log.release(1.0);
        if step == 3 {
            let proof = proof_record(step, 1, 77);
            assert_eq!(log.hold(&proof, &Serial), Ok(Accepted::Proof { unit: 0 }));
            assert_eq!(log.hold(&proof, &Serial), Ok(Accepted::Proof { unit: 0 }), "once is enough");
        }
    }
    assert_eq!(log.proof(0), None, "the state is not at that step yet");
    let batch = log.take(0, 8, 5, &Serial).unwrap();
    assert_eq!((batch.version, batch.is_intact(&Serial)), (3, true));
    assert!(log.applied(0, batch.epoch, batch.version, batch.bytes));
    assert_eq!((log.proof(0), log.proof(0)), (Some(77), None));
    assert_eq!(log.take(0, 8, 5, &Serial).unwrap().version, 5);
}

#[test]
fn proof_of_a_state_that_is_not_there_or_comes_anew_is_left_out() {
    let mut log = Log::new(&[(UNIT, 1, 12)], 100_000).unwrap();
    log.accept(&proof_record(0, 1, 7), &Serial).unwrap();
    log.accept(&state_record(0, 1, &[0; 12]), &Serial).unwrap();
    log.installed(0);
    assert_eq!(log.proof(0), None);
    log.accept(&proof_record(1, 1, 7), &Serial).unwrap();
    assert_eq!(log.proof(0), None, "of a step that has not come");
    log.accept(&proof_record(0, 1, 7), &Serial).unwrap();
    log.accept(&state_record(0, 1, &[1; 12]), &Serial).unwrap();
    log.installed(0);
    assert_eq!(log.proof(0), None, "of the state before");
    log.accept(&proof_record(0, 1, 8), &Serial).unwrap();
    assert_eq!(log.proof(0), Some(8));
}

#[test]
fn damaged_proof_asks_for_the_state() {
    let mut log = log_of(1, 100_000);
    let mut proof = proof_record(0, 1, 7);
    *proof.last_mut().unwrap() ^= 1;
    assert!(matches!(log.accept(&proof, &Serial), Err((Some(0), Fault::Corrupt(_)))));
    assert!(log.needs_state(0));
}
