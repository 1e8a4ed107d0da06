//! Records from trainers to replicas, and the log's treatment of damaged, late and missing ones.

use crate::Outcome;
use crate::harm::{Draw, harm};
use crate::memory::within;
use evermoe::cpu::{AdamWOptions, AdamWStep, Gradient, Serial};
use evermoe::replay::{
    Accepted, BLOCK, Encoding, Fault, HEADER_BYTES, Header, Kind, Log, PROOF_BYTES, Rule, Stored,
    encode_gradient, most_payload_bytes, state_digest,
};
use std::collections::VecDeque;
use xxhash_rust::xxh3::Xxh3;

/// Units: digest of the name, elements.
const UNITS: [(u64, usize); 2] = [(0x0123_4567_89ab_cdef, 5), (0x0123_4567_89ab_cdee, 2 * BLOCK + 100)];
const CHECKSUM_AT: usize = HEADER_BYTES - 8;
/// Memory limit for accepting a record of these units.
const MAX_BYTES: usize = 100_000;

type Received = Result<Accepted, (Option<usize>, Fault)>;

fn log(limit: usize) -> Log {
    let units = UNITS.map(|(id, elements)| (id, elements, 12 * elements));
    Log::new(&units, limit).unwrap()
}

fn rule(step: u64) -> Rule {
    let options = AdamWOptions { lr: 0.1, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, maximize: false };
    Rule::AdamW(AdamWStep::new(&options, step as i64 + 1, 1.0, 1.0).unwrap().to_array())
}

/// The trainer's gradient of a unit in a step, deterministic: blocks of zeros, bfloat16 and float32.
fn gradient(unit: usize, step: u64) -> Vec<f32> {
    let mut draw = Draw::new("gradient", 2 * step + unit as u64);
    let masks: Vec<u32> = (0..3).map(|_| *draw.pick(&[0, 0xffff_0000, u32::MAX])).collect();
    (0..UNITS[unit].1).map(|at| f32::from_bits(draw.word() as u32 & masks[at / BLOCK] & !(1 << 30))).collect()
}

/// Outcome of a step for a unit.
fn kind(unit: usize, step: u64) -> Kind {
    let mut draw = Draw::new("kind", 2 * step + unit as u64);
    *draw.pick(&[Kind::Step, Kind::Step, Kind::Step, Kind::NoStep, Kind::SkipAll])
}

fn state(unit: usize, step: u64) -> Vec<u8> {
    let mut draw = Draw::new("state", 2 * step + unit as u64);
    (0..12 * UNITS[unit].1).map(|_| draw.word() as u8).collect()
}

fn proof(unit: usize, step: u64) -> u64 {
    Draw::new("proof", 2 * step + unit as u64).word()
}

fn header(unit: usize, kind: Kind, step: u64) -> Header {
    let rule = if kind == Kind::Step { rule(step) } else { Rule::None };
    let (id, elements) = UNITS[unit];
    // A unit that takes its first step late has a small count.
    Header { kind, encoding: Encoding::Zero, rule, unit: id, step, t: step / 4, elements, payload_bytes: 0 }
}

fn record(unit: usize, kind: Kind, step: u64) -> Vec<u8> {
    let payload = match kind {
        Kind::Step => {
            let values = gradient(unit, step);
            let mut bytes = vec![0; HEADER_BYTES + most_payload_bytes(values.len())];
            let payload = &mut bytes[HEADER_BYTES..];
            let encoded = encode_gradient(Gradient::F32(&values), values.len(), false, payload, &Serial);
            let (encoding, payload_bytes) = (encoded.encoding, encoded.payload_bytes);
            let header = Header { encoding, payload_bytes, ..header(unit, kind, step) };
            bytes[..HEADER_BYTES].copy_from_slice(&header.seal(encoded.digest));
            bytes.truncate(HEADER_BYTES + payload_bytes);
            return bytes;
        }
        Kind::FullState => state(unit, step),
        Kind::Proof => proof(unit, step).to_le_bytes().to_vec(),
        Kind::NoStep | Kind::SkipAll => Vec::new(),
    };
    let header = Header { payload_bytes: payload.len(), ..header(unit, kind, step) };
    [&header.seal(Header::digest(&payload, &Serial))[..], &payload].concat()
}

/// Passes a record to the log and acts on the result: a state is installed.
fn give(log: &mut Log, bytes: &[u8], hold: bool) -> Received {
    let before = log.bytes();
    let received =
        within(MAX_BYTES, || if hold { log.hold(bytes, &Serial) } else { log.accept(bytes, &Serial) });
    match &received {
        Ok(Accepted::State { unit, .. }) => log.installed(*unit),
        Err((unit, fault)) => {
            assert!(log.bytes() <= before && !fault.to_string().is_empty());
            assert!(unit.is_none_or(|unit| log.needs_state(unit)));
        }
        Ok(_) => {}
    }
    received
}

/// A log of both units with their states at step 0.
fn begun(limit: usize) -> Log {
    let mut log = log(limit);
    for unit in 0..UNITS.len() {
        give(&mut log, &record(unit, Kind::FullState, 0), false).unwrap();
    }
    log
}

/// One damaged record of a step, a state or a proof.
pub(super) fn damaged() -> impl FnMut(&mut Draw) -> Outcome {
    let kinds = [Kind::Step, Kind::NoStep, Kind::SkipAll, Kind::FullState, Kind::Proof];
    let every: Vec<Vec<u8>> = (0..UNITS.len())
        .flat_map(|unit| kinds.iter().flat_map(move |&kind| (0..4).map(move |step| record(unit, kind, step))))
        .collect();
    move |draw| {
        let (bytes, other) = (draw.pick(&every), draw.pick(&every));
        let harmed = harm(draw, bytes, other);
        let mut log = begun(1 << 20);
        match give(&mut log, &harmed, draw.one_in(2)) {
            Err(_) => Outcome::Refused,
            Ok(_) => {
                assert!(every.contains(&harmed), "a damaged record was taken over");
                Outcome::Same
            }
        }
    }
}

/// Records of a sender with other rules, with a matching checksum.
pub(super) fn sealed() -> impl FnMut(&mut Draw) -> Outcome {
    move |draw| {
        let unit = draw.below(UNITS.len());
        let (one, two) = (draw.below(9) as u64, draw.below(9) as u64);
        let complete = record(
            unit,
            *draw.pick(&[Kind::Step, Kind::Step, Kind::NoStep, Kind::FullState, Kind::Proof]),
            one,
        );
        let other = record(draw.below(UNITS.len()), kind(unit, two), two);
        let (head, payload) = complete.split_at(HEADER_BYTES);
        let (mut head, mut payload) = (head.to_vec(), payload.to_vec());
        for _ in 0..1 + draw.below(3) {
            match draw.below(6) {
                0 => head[5 + draw.below(3)] = draw.below(12) as u8,
                1 => crate::harm::overwrite(draw, &mut head[8..48]),
                2 => crate::harm::overwrite(draw, &mut head[48..CHECKSUM_AT]),
                3 => head[16..24].copy_from_slice(&1_u64.to_le_bytes()),
                4 => payload = harm(draw, &payload, &other),
                _ => head[40..48].copy_from_slice(&(payload.len() as u64).to_le_bytes()),
            }
        }
        let mut sum = Xxh3::new();
        sum.update(&head[..CHECKSUM_AT]);
        sum.update(&Header::digest(&payload, &Serial).to_le_bytes());
        head[CHECKSUM_AT..].copy_from_slice(&sum.digest().to_le_bytes());
        let limit = 30_000;
        let mut log = begun(limit);
        let hold = draw.one_in(2);
        let received = give(&mut log, &[head, payload].concat(), hold);
        log.release(0.5);
        assert!(log.bytes() <= limit);
        for unit in 0..UNITS.len() {
            let Some(newest) = log.newest(unit) else { continue };
            for step in newest.saturating_add(1)..=newest.saturating_add(3) {
                let bytes = record(unit, Kind::NoStep, step);
                assert!(step == u64::MAX || log.needs_state(unit) || give(&mut log, &bytes, false).is_ok());
            }
            while let Some(batch) =
                within(MAX_BYTES, || log.take(unit, 1, u64::MAX - draw.word() % 3, &Serial))
            {
                assert!(batch.is_intact(&Serial) && batch.gradients.len() <= 1);
                assert!(log.applied(unit, batch.epoch, batch.version, batch.bytes));
            }
            assert_eq!(log.proof(unit).filter(|_| log.newest(unit) == Some(0)), None);
        }
        if received.is_ok() { Outcome::Same } else { Outcome::Refused }
    }
}

/// Steps of two units over a link that damages, drops, repeats and delays records.
pub(super) fn streams() -> impl FnMut(&mut Draw) -> Outcome {
    move |draw| {
        let mut log = begun(if draw.one_in(3) { 12_000 } else { 1 << 20 });
        let (mut late, mut faults) = (VecDeque::new(), 0);
        for step in 1..2 + draw.below(12) as u64 {
            for unit in 0..UNITS.len() {
                if log.needs_state(unit) && draw.one_in(3) {
                    late.push_back(record(unit, Kind::FullState, step - 1));
                }
                late.push_back(record(unit, kind(unit, step), step));
                if draw.one_in(4) {
                    late.push_back(record(unit, Kind::Proof, step));
                }
            }
            let hold = draw.one_in(2);
            while let Some(bytes) = late.pop_front() {
                match draw.below(30) {
                    0 => {}
                    1 => late.push_back(bytes),
                    2 => {
                        let harmed = harm(draw, &bytes, &record(0, kind(0, step), step));
                        faults += deliver(draw, &mut log, &harmed, hold);
                    }
                    3 => {
                        faults +=
                            deliver(draw, &mut log, &bytes, hold) + deliver(draw, &mut log, &bytes, hold)
                    }
                    _ => faults += deliver(draw, &mut log, &bytes, hold),
                }
            }
            log.release(1.0);
            let until = step - draw.below(3).min(step as usize) as u64;
            take(draw, &mut log, until);
        }
        take(draw, &mut log, u64::MAX);
        if faults > 0 { Outcome::Refused } else { Outcome::Same }
    }
}

/// Offers a record until there is room for it; returns the number of faults.
fn deliver(draw: &mut Draw, log: &mut Log, bytes: &[u8], hold: bool) -> u64 {
    for _ in 0..3 {
        match give(log, bytes, hold) {
            Ok(Accepted::ApplyNow { .. }) => take(draw, log, u64::MAX),
            Ok(Accepted::State { unit, digest }) => {
                let (step, payload) = (log.version(unit).unwrap(), &bytes[HEADER_BYTES..]);
                assert_eq!(payload, state(unit, step), "the state of step {step}");
                assert_eq!(digest, state_digest(&[payload], &Serial));
                return 0;
            }
            Ok(_) => return 0,
            Err(_) => return 1,
        }
    }
    1
}

/// Takes steps of all units, and compares them with the trainer's.
fn take(draw: &mut Draw, log: &mut Log, until: u64) {
    for (unit, (_, elements)) in UNITS.into_iter().enumerate() {
        while let Some(start) = log.version(unit) {
            if let Some(digest) = log.proof(unit) {
                assert_eq!(digest, proof(unit, start));
            }
            let Some(batch) = log.take(unit, 1 + draw.below(4), until, &Serial) else { break };
            assert!(batch.is_intact(&Serial));
            let steps: Vec<u64> =
                (start + 1..=batch.version).filter(|&step| kind(unit, step) == Kind::Step).collect();
            assert_eq!(steps.len(), batch.gradients.len());
            for (position, (&step, found)) in steps.iter().zip(&batch.gradients).enumerate() {
                assert_eq!(bits(found, elements), bits(&Some(Stored::F32(gradient(unit, step))), elements));
                let numbers = &batch.numbers[position * AdamWStep::LEN..][..AdamWStep::LEN];
                assert_eq!(numbers, rule(step).as_slice());
            }
            assert!(log.applied(unit, batch.epoch, batch.version, batch.bytes));
        }
    }
}

fn bits(stored: &Option<Stored>, len: usize) -> Vec<u32> {
    match stored {
        None => vec![0; len],
        Some(Stored::F32(values)) => values.iter().map(|value| value.to_bits()).collect(),
        Some(Stored::Bf16(values)) => values.iter().map(|value| u32::from(value.to_bits()) << 16).collect(),
    }
}

const _: () = assert!(PROOF_BYTES == 8);
