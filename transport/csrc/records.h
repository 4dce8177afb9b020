// Encrypted records on a stream, for one direction each:
//
//   length of the text (4 bytes, little endian) | text under AES-256-GCM | tag (16 bytes)
//
// The length is authenticated with the text. The nonce is a counter that no record carries, so a
// record that is altered, dropped, repeated or out of order does not open. Key and counter begin anew
// after records_per_key records: the next secret follows from this one, and not the other way around.
// With H(label) = HMAC-SHA256(secret, label): the key is H("key"), the nonce the first 12 bytes of
// H("nonce") XOR the record's number (0, 1, ..., big endian), the next secret H("next").
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libcrypto.h"

namespace ms {

constexpr size_t RECORD_TEXT_BYTES = 65536, RECORD_HEAD_BYTES = 4, RECORD_TAG_BYTES = 16;
constexpr size_t MAX_RECORD_BYTES = RECORD_HEAD_BYTES + RECORD_TEXT_BYTES + RECORD_TAG_BYTES;
constexpr size_t SECRET_BYTES = 32;
// 64 GiB of text under one key: 2^32 blocks, of which GCM allows 2^64 / (a wanted margin of 2^32).
constexpr uint64_t RECORDS_PER_KEY = 1 << 20;

class RecordCipher {
 public:
  // Throws NoCrypto, and std::invalid_argument for a secret of another size.
  RecordCipher(const std::string& secret, bool seals, uint64_t records_per_key);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;
  // Seals or opens a whole record in place. Returns false if it does not open.
  bool run(uint8_t* record, size_t text_bytes);

 private:
  using Block = std::array<uint8_t, SECRET_BYTES>;
  Block derived(const char* label) const;
  void use_secret();

  const LibCrypto& lib_;
  const bool seals_;
  const uint64_t records_per_key_;
  void* context_;
  Block secret_{};
  std::array<uint8_t, 12> first_nonce_{};
  uint64_t num_records_ = 0;  // under this key
};

class RecordWriter {
 public:
  RecordWriter(const std::string& secret, uint64_t records_per_key);
  // Adds text to the record, as far as it has room; returns how many bytes it took.
  size_t add(const uint8_t* text, size_t bytes);
  // Seals the record and returns it; its memory may be added to again after it is sent.
  iovec seal();

 private:
  RecordCipher cipher_;
  std::vector<uint8_t> record_;
  size_t text_bytes_ = 0;
};

class RecordReader {
 public:
  RecordReader(const std::string& secret, uint64_t records_per_key);
  // The memory for received bytes, which is never empty after next() has returned nothing.
  iovec room();
  void add(size_t bytes) { end_ += bytes; }
  // Opens the next record that is there as a whole, whose text is valid until room(). Throws
  // CorruptMessage.
  std::optional<iovec> next();
  bool is_within_record() const { return end_ > begin_; }

 private:
  RecordCipher cipher_;
  std::vector<uint8_t> bytes_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace ms
