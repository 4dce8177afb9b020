#include "records.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "errors.h"

namespace ms {
namespace {

constexpr int GET_TAG = 0x10, SET_TAG = 0x11;  // EVP_CTRL_AEAD_GET_TAG and _SET_TAG

void require(bool is_done) {
  if (!is_done) throw NoCrypto("OpenSSL's libcrypto does not offer AES-256-GCM with SHA-256 here");
}

uint32_t length_in(const uint8_t* head) {
  return head[0] | uint32_t{head[1]} << 8 | uint32_t{head[2]} << 16 | uint32_t{head[3]} << 24;
}

}  // namespace

// ---- the cipher

RecordCipher::RecordCipher(const std::string& secret, bool seals, uint64_t records_per_key)
    : lib_(LibCrypto::get()), seals_(seals), records_per_key_(records_per_key), context_(nullptr) {
  if (secret.size() != SECRET_BYTES || records_per_key < 1)
    throw std::invalid_argument("a secret of 32 bytes and one record per key or more are needed");
  std::memcpy(secret_.data(), secret.data(), SECRET_BYTES);
  context_ = lib_.EVP_CIPHER_CTX_new();
  require(context_ != nullptr);
  try {
    use_secret();
  } catch (...) {  // no destructor runs
    lib_.EVP_CIPHER_CTX_free(context_);
    throw;
  }
}

RecordCipher::~RecordCipher() {
  lib_.EVP_CIPHER_CTX_free(context_);
  lib_.OPENSSL_cleanse(secret_.data(), secret_.size());
}

RecordCipher::Block RecordCipher::derived(const char* label) const {
  Block out;
  unsigned size = 0;
  const auto* text = reinterpret_cast<const uint8_t*>(label);
  require(lib_.HMAC(lib_.EVP_sha256(), secret_.data(), SECRET_BYTES, text, std::strlen(label), out.data(), &size));
  return out;
}

void RecordCipher::use_secret() {
  Block key = derived("key");
  const Block nonce = derived("nonce");
  std::memcpy(first_nonce_.data(), nonce.data(), first_nonce_.size());
  num_records_ = 0;
  const bool is_set =
      lib_.EVP_CipherInit_ex(context_, lib_.EVP_aes_256_gcm(), nullptr, key.data(), first_nonce_.data(), seals_) == 1;
  lib_.OPENSSL_cleanse(key.data(), key.size());
  require(is_set);
}

bool RecordCipher::run(uint8_t* record, size_t text_bytes) {
  if (num_records_ == records_per_key_) {
    secret_ = derived("next");
    use_secret();
  }
  std::array<uint8_t, 12> nonce = first_nonce_;
  for (int i = 0; i < 8; i++) nonce[11 - i] ^= static_cast<uint8_t>(num_records_ >> 8 * i);
  num_records_++;
  uint8_t *text = record + RECORD_HEAD_BYTES, *tag = text + text_bytes;
  int size = 0;
  require(lib_.EVP_CipherInit_ex(context_, nullptr, nullptr, nullptr, nonce.data(), -1) == 1);
  if (!seals_) require(lib_.EVP_CIPHER_CTX_ctrl(context_, SET_TAG, RECORD_TAG_BYTES, tag) == 1);
  require(lib_.EVP_CipherUpdate(context_, nullptr, &size, record, RECORD_HEAD_BYTES) == 1);
  require(lib_.EVP_CipherUpdate(context_, text, &size, text, static_cast<int>(text_bytes)) == 1);
  uint8_t none[16];
  if (lib_.EVP_CipherFinal_ex(context_, none, &size) != 1) {
    require(!seals_);
    return false;
  }
  if (seals_) require(lib_.EVP_CIPHER_CTX_ctrl(context_, GET_TAG, RECORD_TAG_BYTES, tag) == 1);
  return true;
}

// ---- both ends

RecordWriter::RecordWriter(const std::string& secret, uint64_t records_per_key)
    : cipher_(secret, true, records_per_key), record_(MAX_RECORD_BYTES) {}

size_t RecordWriter::add(const uint8_t* text, size_t bytes) {
  const size_t taken = std::min(bytes, RECORD_TEXT_BYTES - text_bytes_);
  std::memcpy(record_.data() + RECORD_HEAD_BYTES + text_bytes_, text, taken);
  text_bytes_ += taken;
  return taken;
}

iovec RecordWriter::seal() {
  for (size_t i = 0; i < RECORD_HEAD_BYTES; i++) record_[i] = static_cast<uint8_t>(text_bytes_ >> 8 * i);
  cipher_.run(record_.data(), text_bytes_);
  const size_t bytes = RECORD_HEAD_BYTES + text_bytes_ + RECORD_TAG_BYTES;
  text_bytes_ = 0;
  return {record_.data(), bytes};
}

RecordReader::RecordReader(const std::string& secret, uint64_t records_per_key)
    : cipher_(secret, false, records_per_key), bytes_(2 * MAX_RECORD_BYTES) {}

iovec RecordReader::room() {
  if (begin_ > 0) std::memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  return {bytes_.data() + end_, bytes_.size() - end_};
}

std::optional<iovec> RecordReader::next() {
  if (end_ - begin_ < RECORD_HEAD_BYTES) return {};
  uint8_t* record = bytes_.data() + begin_;
  const size_t text_bytes = length_in(record);
  if (text_bytes < 1 || text_bytes > RECORD_TEXT_BYTES)
    throw CorruptMessage("an encrypted record of " + std::to_string(text_bytes) + " bytes");
  const size_t bytes = RECORD_HEAD_BYTES + text_bytes + RECORD_TAG_BYTES;
  if (end_ - begin_ < bytes) return {};
  if (!cipher_.run(record, text_bytes))
    throw CorruptMessage("an encrypted record was altered, repeated or left out on the way");
  begin_ += bytes;
  return iovec{record + RECORD_HEAD_BYTES, text_bytes};
}

}  // namespace ms
